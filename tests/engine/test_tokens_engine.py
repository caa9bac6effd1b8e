# SPDX-License-Identifier: Apache-2.0
"""The router's tokens of a text are those of a real vLLM, and its predictions from them equal the reuse.

The tokens come from the engine or are made by the router itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")

from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.route.tokens.engine.client import Engine
from kvrouter.router.route.tokens.forward_ids import forwarded_body
from kvrouter.router.route.tokens.local.local_tokenizer import LocalTokenizer
from kvrouter.router.route.tokens.prompt_tokens import Prompt
from tests.engine.chat_model import write_adapter, write_chat_model
from tests.engine.chat_server import ChatServer
from tests.engine.engine_process import last_published
from tests.support.chats import chat, completion, requests
from tests.support.engine_tokens import tokenized
from tests.support.router_process import RouterError, RouterProcess

pytestmark = pytest.mark.engine

REQUESTS = 280
CONVERSATIONS = 12
TURNS = 4
MODEL = "chat-tiny"
WORKER = "real"
ADAPTER = "style"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module", params=[(), ("--enable-scale-out",)], ids=["tokenize", "render"])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    folder = tmp_path_factory.mktemp("serve")
    adapter = write_adapter(folder / "adapter")
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}")
    with ChatServer(folder, model, (*request.param, *lora)) as running:
        yield running


Asked = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def asked(seed: int) -> Asked:
    return list(requests(random.Random(seed), REQUESTS))


@pytest.fixture(scope="module")
def expected(server: ChatServer, asked: Asked) -> list[list[int] | None]:
    """Return the engine's tokens of each request, or None for a request that it refuses."""
    return truths(server, asked)


def truths(server: ChatServer, asked: Asked) -> list[list[int] | None]:
    def ask(request: tuple[str, dict[str, Any]]) -> list[int] | None:
        path, body = request
        status, answer = server.post(path, body | {"max_tokens": 1, "return_token_ids": True})
        if status != 200:
            assert status == 400, answer
            return None
        ids = answer["prompt_token_ids"] if "prompt_token_ids" in answer else answer["choices"][0]["prompt_token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(ids)
        return list(ids)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, asked))


async def prompts(server: ChatServer, asked: Asked, local: Path | None) -> list[Prompt]:
    tokenizer = None if local is None else LocalTokenizer(local, datetime.now)
    return await tokenized(MODEL, Engine(server.url, "1", VLLM.tokens), asked, tokenizer)


@pytest.mark.parametrize("here", [False, True], ids=["asked", "made here"])
def test_tokens_are_the_engines(
    server: ChatServer,
    model: Path,
    asked: Asked,
    expected: list[list[int] | None],
    here: bool,
    seed: int,
    table: Callable[..., None],
    request: pytest.FixtureRequest,
) -> None:
    router_prompts = asyncio.run(prompts(server, asked, model if here else None))
    wrong = []
    sources: Counter[str] = Counter()
    for (path, body), truth, prompt in zip(asked, expected, router_prompts, strict=True):
        sources[prompt.source] += 1
        if truth is None:
            # The router claims no tokens of a request that the engine refuses, except for the engine's limits, which
            # need not be known here.
            continue
        if prompt.token_ids is None or prompt.token_ids.tolist() != truth:
            wrong.append(f"seed {seed}, {path} {body}\n  engine {truth}\n  router {prompt}")
    served = [truth for truth in expected if truth is not None]
    table(
        "Tokens from text (vllm serve, tiny hybrid model, its own tokenizer and template)",
        ("ways", "requests", "served", "equal", "tokens", "given by"),
        (
            request.node.callspec.id,
            str(REQUESTS),
            str(len(served)),
            str(len(served) - len(wrong)),
            str(sum(map(len, served))),
            ", ".join(f"{name} {count}" for name, count in sorted(sources.items())),
        ),
    )
    assert not wrong, "\n".join(wrong[:3])
    assert len(served) >= 200
    if here:
        assert sources["local"] >= 0.9 * REQUESTS


def wait_for_adapter(router: RouterProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            router.request("POST", "/query", {"model": ADAPTER, "token_ids": [1]})
        except RouterError:
            assert time.monotonic() < deadline, "the router does not see the engine's adapter"
            time.sleep(0.1)
        else:
            return


@pytest.mark.parametrize("here", [False, True], ids=["asked", "made here"])
def test_conversations_reuse_what_the_router_predicted(
    server: ChatServer,
    model: Path,
    here: bool,
    seed: int,
    tmp_path: Path,
    table: Callable[..., None],
    request: pytest.FixtureRequest,
) -> None:
    rng = random.Random(seed + 1 + here)
    arguments = ["--tokenizer", f"{MODEL}={model}"] if here else []
    arguments += ["--model-alias", f"assistant={MODEL}", "--tokenize-timeout-s", str(TIMEOUT_S)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    seq = -1
    wrong: list[str] = []
    hits: Counter[str] = Counter()
    reused = total = 0
    # The model's name in requests to the router, and its name in the engine.
    names = [("assistant", MODEL), ("assistant", MODEL), (ADAPTER, ADAPTER)]
    conversations = [(names[n % len(names)], chat(rng)["messages"][:4]) for n in range(CONVERSATIONS)]
    # Both the model and its adapter get this conversation: neither may be credited with the other's blocks.
    conversations += [(name, list(conversations[0][1])) for name in names[1:]]
    with RouterProcess(tmp_path / "router", arguments) as router:
        try:
            registration = {"worker_id": WORKER, "model": MODEL, "url": server.url, "endpoint": server.endpoint}
            router.request("POST", "/register", registration | {"replay_endpoint": server.replay_endpoint})
            router.wait_connected(WORKER)
            wait_for_adapter(router)
            for _ in range(TURNS):
                question = " ".join(rng.choice(("alpha", "beta")) for _ in range(40))
                for (name, served), messages in conversations:
                    messages.append({"role": "user", "content": question})
                    seq = last_published(context, server.replay_endpoint, seq)
                    if seq >= 0:
                        router.wait_seen(WORKER, seq)
                    body: dict[str, Any] = {"messages": messages}
                    selection = router.request("POST", "/select", body | {"model": name})
                    sampling = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
                    status, answer = server.post("/v1/chat/completions", body | sampling | {"model": served})
                    assert status == 200, answer
                    usage = answer["usage"]
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    if (selection["overlap"]["gpu"], selection["tokens"]["num_tokens"]) != (
                        cached,
                        usage["prompt_tokens"],
                    ):
                        wrong.append(f"seed {seed}, {served}: said {selection}, the engine {usage}")
                    hits[served] += cached > 0
                    reused += cached
                    total += usage["prompt_tokens"]
                    messages.append(
                        {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "ok"}
                    )
            way = router.worker(WORKER)["tokens"]
        finally:
            context.destroy(linger=0)
    count = TURNS * len(conversations)
    table(
        "Conversations by text through /select, one at a time (same engine; a third asks its LoRA adapter)",
        ("ways", "requests", "predicted = delivered", "with a hit", "the adapter's", "tokens reused"),
        (
            request.node.callspec.id,
            str(count),
            str(count - len(wrong)),
            str(hits.total()),
            str(hits[ADAPTER]),
            f"{reused / total:.0%}",
        ),
    )
    assert not wrong, "\n".join(wrong[:3])
    asked_way = "render" if request.node.callspec.params["server"] else "tokenize"
    assert way == {"way": "local" if here else asked_way, "problem": ""}
    assert hits.total() >= count // 3 and hits[ADAPTER] >= CONVERSATIONS // 3


def test_a_completion_sent_on_with_ids_is_answered_alike(server: ChatServer, seed: int) -> None:
    rng = random.Random(seed + 3)
    sent: Asked = []
    while len(sent) < 12:
        body = completion(rng) | {"max_tokens": 8, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        body["prompt"] *= 4
        sent.append(("/v1/completions", body))
    router_prompts = asyncio.run(prompts(server, sent, None))
    replaced = 0
    for (path, body), prompt in zip(sent, router_prompts, strict=True):
        raw = msgspec.json.encode(body)
        forwarded = msgspec.json.decode(forwarded_body(path, raw, prompt))
        replaced += forwarded != body
        # The first request fills the cache, so that the two compared requests reuse the same blocks.
        _, (status, plain_answer), (_, forwarded_answer) = (
            server.post(path, request_body) for request_body in (body, body, forwarded)
        )
        assert status == 200
        assert forwarded_answer["choices"] == plain_answer["choices"]
        assert forwarded_answer["usage"] == plain_answer["usage"]
    assert replaced >= 3
