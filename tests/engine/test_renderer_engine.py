# SPDX-License-Identifier: Apache-2.0
"""A real vLLM without render endpoints, and a real `vllm launch render` beside it as the source of its tokens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

pytest.importorskip("vllm")

from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.route.tokens.engine.client import ABSENT, Engine
from tests.engine.chat_fleet import MODEL, TOKENIZE_TIMEOUT_S, Fleet, ask, predicted
from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.engine.render_server import RenderServer
from tests.support.chats import requests
from tests.support.engine_tokens import tokenized
from tests.support.fleet import until
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

REQUESTS = 80
# All turns fit into the context of the model.
TURNS = 8


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ChatServer, RenderServer]]:
    folder: Path = tmp_path_factory.mktemp("renderer")
    model = write_chat_model(folder / "model")
    engine, renderer = ChatServer(folder, model), RenderServer(folder, model)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        # Both start at the same time.
        for started in [pool.submit(stack.enter_context, server) for server in (engine, renderer)]:
            started.result()
        yield engine, renderer


def test_a_renderers_tokens_are_the_engines(servers: tuple[ChatServer, RenderServer], seed: int) -> None:
    engine, renderer = servers
    assert engine.post("/v1/completions/render", {"prompt": "a"})[0] in ABSENT
    queries = list(requests(random.Random(seed), REQUESTS))

    def truth(request: tuple[str, dict[str, Any]]) -> list[int] | None:
        path, body = request
        status, answer = engine.post(path, body | {"max_tokens": 1, "return_token_ids": True})
        if status != 200:
            return None
        return list(answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"])

    with ThreadPoolExecutor(8) as pool:
        truths = list(pool.map(truth, queries))
    prompts = asyncio.run(tokenized(MODEL, Engine(engine.url, "1", VLLM.tokens), queries, renderers=[renderer.url]))
    sources: Counter[str] = Counter()
    for request, ids, prompt in zip(queries, truths, prompts, strict=True):
        if ids is not None:
            sources[prompt.source] += 1
            assert prompt.token_ids is not None and prompt.token_ids.tolist() == ids, (seed, request, ids, prompt)
    assert sources["render"] >= 0.7 * REQUESTS, sources


def test_chats_and_texts_are_placed_by_a_renderers_tokens(
    servers: tuple[ChatServer, RenderServer], tmp_path: Path, seed: int
) -> None:
    engine, renderer = servers
    rng = random.Random(seed)
    flags = ["--tokenize-timeout-s", str(TOKENIZE_TIMEOUT_S), "--worker", engine.spec("w0")]
    flags += ["--renderer", f"{MODEL}={renderer.url}"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wrong, hits = [], 0
    with RouterProcess(tmp_path / "router", flags) as router:
        try:
            fleet = Fleet(router, {"w0": engine}, context)
            with fleet.client:
                until(lambda: router.worker("w0")["tokens"] == {"way": "render", "problem": ""}, "verified")
                messages: list[dict[str, Any]] = [{"role": "system", "content": "You are brief. " * 10}]
                text = "Größe und Maß. " * 10
                # The engine must publish events once.
                ask(fleet, prompt=list(range(10, 200)))
                until(lambda: router.worker("w0")["state"] == "live", "live")
                for _ in range(TURNS):
                    more = " ".join(rng.choice(("alpha", "beta")) for _ in range(15))
                    messages.append({"role": "user", "content": more})
                    text += more
                    for body in ({"messages": messages}, {"prompt": text}):
                        fleet.settle()
                        answer = ask(fleet, **body)
                        hit, reused, _ = predicted(answer)
                        hits += reused > 0
                        if hit != reused:
                            wrong.append((body, hit, reused))
                    messages.append({"role": "assistant", "content": "ok"})
            assert router.metric("kvrouter_prompts_total", source="render") == 2 * TURNS
            assert router.request("GET", "/health")["status"] == "ok"
            # A worker is what runs a model.
            assert [row["worker_id"] for row in router.request("GET", "/workers")["workers"]] == ["w0"]
        finally:
            context.destroy(linger=0)
    assert not wrong, wrong[:2]
    assert hits >= 2 * TURNS - 4
