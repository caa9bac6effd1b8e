# SPDX-License-Identifier: Apache-2.0
"""One model name, served by a real vLLM and a real SGLang, both without the engine patch.

Each engine is recognised over HTTP, its reuse of ids, texts and chats is predicted exactly, and choices are explained
in the same words.
"""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
import zmq

from kvrouter.router.model.engines.engine_metrics import engine_life, parse_engine_load
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH
from kvrouter.router.route.tokens.engine.client import Engine
from tests.engine.chat_fleet import Fleet, until
from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.sglang.sglang_server import MODEL, PAGE_TOKENS, SglangServer, post
from tests.support.chats import WORDS, chat, completion
from tests.support.engine_tokens import tokenized
from tests.support.router_process import RouterProcess
from tests.support.tiny_tokenizer import VOCAB_SIZE

# Prompts that go to both engines, and prompts that go through the proxy.
PROMPTS, PROXIED = 60, 30
REQUESTS = 80
LONGEST_TOKENS = 700
MIN_HITS = 20
TIMEOUT_S = 60.0
# By default, vLLM's CPU build takes most of the machine's memory.
LITTLE_MEMORY = ("--gpu-memory-utilization", "0.2")
FULL_ATTENTION = {"groups": [{"kind": "full_attention", "block_size": PAGE_TOKENS}]}

# Fields of a candidate that are left out where they have nothing to report.
SOMETIMES = {"reason", "pending", "approximate"}

Body = dict[str, Any]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        # Keep SGLang's packages and the stand-in for torchvision out of vLLM's process.
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"].partition(os.pathsep)[0], "KVROUTER_PATCH": "0"}
        model = write_chat_model(folder / "vllm")
        vllm = ChatServer(folder, model, ("--block-size", "16", *LITTLE_MEMORY), MODEL, environment)
        # Both engines start at the same time.
        stack.push(vllm)
        vllm.launch()
        sglang = stack.enter_context(SglangServer(folder, windows=False, patched=False))
        vllm.__enter__()
        spec = f"vllm={vllm.url},events={vllm.endpoint},replay={vllm.replay_endpoint},model={MODEL}"
        flags = ["--worker", spec, "--tokenize-timeout-s", str(TIMEOUT_S)]
        router = stack.enter_context(RouterProcess(folder / "router", flags))
        # The registration leaves out the kind of the engine.
        worker = {"worker_id": "sglang", "model": MODEL, "url": sglang.url, "catalog": FULL_ATTENTION}
        router.request(
            "POST", "/register", worker | {"endpoint": sglang.endpoint, "replay_endpoint": sglang.replay_endpoint}
        )
        engines: dict[str, Any] = {"vllm": vllm, "sglang": sglang}
        mixed_fleet = Fleet(router, engines, stack.enter_context(zmq.Context()))
        for engine in engines.values():
            post(f"{engine.url}{TEXT_PATH}", {"model": MODEL, "prompt": list(range(10, 200)), "max_tokens": 2})
        until(lambda: kinds_of(router) == {"vllm": ("vllm", "live"), "sglang": ("sglang", "live")}, "recognised")
        # The first text makes the router verify both engines, with requests of its own.
        tokens_of(router, {"prompt": "hello"})
        until(lambda: ways_of(router) == {"vllm": "tokenize", "sglang": "tokenize"}, "both are verified")
        yield mixed_fleet


def kinds_of(router: RouterProcess) -> dict[str, tuple[str, str]]:
    rows = router.request("GET", "/workers")["workers"]
    return {row["worker_id"]: (row["engine"], row["state"]) for row in rows}


def ways_of(router: RouterProcess) -> dict[str, str]:
    return {
        row["worker_id"]: row.get("tokens", {}).get("way", "") for row in router.request("GET", "/workers")["workers"]
    }


def tokens_of(router: RouterProcess, body: Body) -> int | None:
    tokens = router.request("POST", "/select", body | {"model": MODEL, "dry_run": True})["tokens"]
    return None if tokens["source"] == "none" else int(tokens["num_tokens"])


def bodies(rng: Random, count: int) -> Iterator[Body]:
    """Yield requests with ids, texts and chats that go on, are repeated, and are cut short."""
    ids: list[list[int]] = []
    texts: list[str] = []
    talks: list[list[dict[str, str]]] = []
    for _ in range(count):
        kind = rng.randrange(3)
        own = " ".join(rng.choice(WORDS[:9]) for _ in range(rng.randrange(3, 30)))
        if kind == 0:
            beginning = list(rng.choice(ids[-5:])) if ids and rng.random() < 0.8 else []
            beginning = beginning[: rng.randrange(len(beginning) + 1)] if rng.random() < 0.3 else beginning
            new = [rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randrange(1, 120))]
            ids.append((beginning + new)[:LONGEST_TOKENS])
            yield {"prompt": ids[-1]}
        elif kind == 1:
            texts.append(((rng.choice(texts[-4:]) if texts and rng.random() < 0.8 else "") + " " + own)[:1500])
            # For log-probabilities of the prompt, either engine computes all of it.
            yield {"prompt": texts[-1]} | ({"echo": True, "logprobs": 1} if rng.random() < 0.2 else {})
        else:
            talk = list(rng.choice(talks[-4:])) if talks and rng.random() < 0.8 else []
            talk = talk[-8:] if rng.random() < 0.1 else talk[:8]
            if talk:
                talk.append({"role": "assistant", "content": "so it is"})
            talks.append([*talk, {"role": "user", "content": own}])
            yield {"messages": talks[-1]}


def path_of(body: Body) -> str:
    return CHAT_PATH if "messages" in body else TEXT_PATH


def sampled(body: Body, rng: Random) -> Body:
    return body | {"model": MODEL, "max_tokens": rng.randrange(1, 6), "temperature": 0, "ignore_eos": True}


def cached(answer: Any) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return (details or {}).get("cached_tokens") or 0


def question(body: Body) -> Body:
    """Return a request in the form of `/select`, which has its own field for token ids."""
    if isinstance(body.get("prompt"), list):
        return {"token_ids": body["prompt"]}
    return body


def words(reason: str) -> str:
    """Return a reason without the names and numbers of the case."""
    return re.sub(r"[0-9][0-9,.]*", "N", re.sub(r"\b(vllm|sglang)\b", "W", reason))


def test_each_engine_reuses_what_was_predicted(fleet: Fleet, seed: int) -> None:
    rng = Random(seed)
    hits: Counter[str] = Counter()
    wrong: list[Any] = []
    reasons: dict[str, set[str]] = {}
    for body in bodies(rng, PROMPTS):
        fleet.settle()
        query = question(body) | {"model": MODEL, "explain": True, "dry_run": True}
        selection = fleet.router.request("POST", "/select", query)
        reasons.setdefault(selection["worker_id"], set()).add(words(selection["reason"]))
        # The answer has the same fields for each engine.
        assert len({frozenset(candidate) - SOMETIMES for candidate in selection["candidates"]}) == 1
        predicted = {candidate["worker_id"]: candidate["overlap"]["gpu"] for candidate in selection["candidates"]}
        counted = selection["tokens"]["num_tokens"] if "tokens" in selection else len(query["token_ids"])
        assert predicted.keys() == fleet.engines.keys()
        for name, engine in fleet.engines.items():
            answer, _ = post(engine.url + path_of(body), sampled(body, rng))
            reused = cached(answer)
            hits[name] += reused > 0
            tokens = answer["usage"]["prompt_tokens"]
            if (predicted[name], counted) != (reused, tokens):
                wrong.append((name, list(body), counted, tokens, predicted[name], reused))
    print(f"\nmixed fleet: {PROMPTS} prompts each, hits {dict(hits)}, wrong {len(wrong)}; {reasons}")
    assert not wrong, wrong[:4]
    assert min(hits[name] for name in fleet.engines) >= MIN_HITS
    if len(reasons) == len(fleet.engines):
        assert reasons["vllm"] & reasons["sglang"]


def test_the_proxy_places_and_predicts_for_both(fleet: Fleet, seed: int) -> None:
    rng = Random(seed + 1)
    chosen: Counter[str] = Counter()
    wrong, hits = [], 0
    for body in bodies(rng, PROXIED):
        fleet.settle()
        # Sometimes let one engine compute the prompt first, so that it holds most of it.
        if rng.random() < 0.3:
            engine = fleet.engines[rng.choice(sorted(fleet.engines))]
            post(engine.url + path_of(body), sampled(body, rng))
            fleet.settle()
        answer, headers = post(f"http://127.0.0.1:{fleet.router.port}{path_of(body)}", sampled(body, rng))
        reused = cached(answer)
        chosen[headers["x-kvrouter-worker"]] += 1
        hits += reused > 0
        if int(headers["x-kvrouter-predicted-hit"]) != reused:
            wrong.append((headers["x-kvrouter-worker"], list(body), headers["x-kvrouter-predicted-hit"], reused))
    print(f"\nthrough the proxy: {PROXIED} prompts, {dict(chosen)}, {hits} hits, {len(wrong)} wrong")
    assert not wrong, wrong[:4]
    assert chosen.keys() == fleet.engines.keys()


def test_neither_engine_is_taken_for_dead(fleet: Fleet) -> None:
    rows = {row["worker_id"]: row for row in fleet.router.request("GET", "/workers")["workers"]}
    assert {name: row["engine"] for name, row in rows.items()} == {"vllm": "vllm", "sglang": "sglang"}
    for row in rows.values():
        assert (row["state"], row["tokens"]["way"], row["gaps"]) == ("live", "tokenize", 0), row
        assert "restarted" not in row["reason"] and "answers again" not in row["reason"]


def test_what_is_read_of_metrics_is_there(fleet: Fleet) -> None:
    for name, engine in fleet.engines.items():
        gauges = ENGINES[name].gauges
        pages = [urllib.request.urlopen(f"{engine.url}/metrics", timeout=TIMEOUT_S).read() for _ in range(2)]
        load = parse_engine_load(pages[0], 0, gauges)
        assert load is not None and (load.waiting, load.running) == (0, 0)
        assert gauges.kv_usage in pages[0]
        first, second = (engine_life(page, gauges) for page in pages)
        assert first == second is not None
        urllib.request.urlopen(engine.url + ENGINES[name].health_path, timeout=TIMEOUT_S).close()


def test_tokens_are_those_of_sglang(fleet: Fleet, seed: int) -> None:
    """Compare tokens of texts, and of chats with tools, parts, endings to be continued and template arguments."""
    rng = Random(seed)
    sglang = fleet.engines["sglang"]
    sent = [(CHAT_PATH, chat(rng)) if rng.random() < 0.7 else (TEXT_PATH, completion(rng)) for _ in range(REQUESTS)]

    prompts = asyncio.run(tokenized(MODEL, Engine(sglang.url, "1", ENGINES["sglang"].tokens), sent))
    wrong, equal = [], 0
    for (path, body), prompt in zip(sent, prompts, strict=True):
        answer, _ = post(sglang.url + path, body | {"model": MODEL, "max_tokens": 1, "return_token_ids": True})
        if answer is None:
            # The engine refuses the request.
            continue
        truth = answer["choices"][0]["prompt_token_ids"]
        equal += prompt.token_ids is not None and prompt.token_ids.tolist() == truth
        if prompt.token_ids is None or prompt.token_ids.tolist() != truth:
            wrong.append((path, body, prompt, truth))
    print(f"\ntokens of SGLang: {equal} of {equal + len(wrong)} equal, {REQUESTS} asked")
    assert not wrong, wrong[:2]
    assert equal >= REQUESTS // 2
