# SPDX-License-Identifier: Apache-2.0
"""Messages of Anthropic's API through `kvrouter serve` to a real SGLang server, as Claude Code sends them.

The router's prediction equals the reuse that the engine reports, also with an attribution that changes in each request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.sglang_server import MODEL, SglangServer, post
from tests.support.anthropic_bodies import BILLING, message
from tests.support.fleet import until
from tests.support.router_process import RouterProcess

CONVERSATIONS = 24
WORKER = "w"
# Some pages of 16 tokens. The server's cache keeps some of these conversations.
LONG = "the cache of an engine keeps what it computed " * 6
MAX_TOKENS = 700
TOKENIZE_TIMEOUT_S = "60"


@pytest.fixture(scope="module", params=["tokenize", "local"])
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangServer, Path]]:
    folder = tmp_path_factory.mktemp("sglang")
    with SglangServer(folder) as started:
        yield started, folder / "model"


@pytest.fixture(scope="module")
def router(
    server: tuple[SglangServer, Path], source: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterProcess]:
    engine, model = server
    flags = ["--tokenize-timeout-s", TOKENIZE_TIMEOUT_S]
    if source == "local":
        flags += ["--tokenizer", f"{MODEL}={model}"]
    with RouterProcess(tmp_path_factory.mktemp("router"), flags) as started:
        worker = {"worker_id": WORKER, "model": MODEL, "url": engine.url, "endpoint": engine.endpoint}
        started.request("POST", "/register", worker | {"replay_endpoint": engine.replay_endpoint})
        started.wait_proven(WORKER)
        # The first message makes the router verify the engine.
        hello = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
        until(lambda: ask(started, hello)[0] is not None, "tokens of messages are known")
        yield started


def ask(router: RouterProcess, body: dict[str, Any]) -> tuple[int | None, int]:
    """Return the predicted hit and the tokens that the engine reused."""
    answer, headers = post(f"http://127.0.0.1:{router.port}/v1/messages", body | {"model": MODEL})
    assert answer is not None, body
    hit = headers.get("x-kvrouter-predicted-hit")
    return None if hit is None else int(hit), answer["usage"].get("cache_read_input_tokens") or 0


def as_claude_code(rng: random.Random, *, changes: bool) -> dict[str, Any]:
    """Return a conversation whose first system text is the attribution, which may change in each request."""
    body = message(rng) | {"max_tokens": 4}
    # Without a reasoning parser the engine refuses thinking; it always refuses what is redacted.
    body.pop("thinking", None)
    for turn in body["messages"]:
        if isinstance(turn["content"], list):
            turn["content"] = [part for part in turn["content"] if part["type"] != "redacted_thinking"]
    attribution = [{"type": "text", "text": BILLING}] if changes else []
    body["system"] = [*attribution, {"type": "text", "text": LONG + str(rng.randrange(4))}]
    return body


def test_what_is_predicted_is_reused(router: RouterProcess, source: str, seed: int) -> None:
    rng = random.Random(seed + (source == "local"))
    outcomes: Counter[str] = Counter()
    tokens: Counter[bool] = Counter()
    wrong = []
    for number in range(CONVERSATIONS):
        changes = number % 2 == 0
        body = as_claude_code(rng, changes=changes)
        turns = body["messages"]
        # Send the conversation as it grew: each turn of the client is a request.
        for end in [n for n, turn in enumerate(turns) if turn["role"] == "user"]:
            if changes:
                body["system"][0]["text"] = f"{BILLING} cch={rng.randrange(10**6)};"
            # Wait twice, because the engine ends its step after it has answered.
            router.wait_proven(WORKER)
            router.wait_proven(WORKER)
            predicted, reused = ask(router, body | {"messages": turns[: end + 1]})
            outcomes["unknown" if predicted is None else "equal" if predicted == reused else "wrong"] += 1
            tokens[changes] += reused
            if predicted != reused:
                wrong.append(f"seed {seed}: predicted {predicted}, reused {reused}\n{body}")
    print(f"{source}: {dict(outcomes)}, {tokens[False]} tokens reused, {tokens[True]} with a changing attribution")
    assert not wrong, "\n".join(wrong[:3])
    assert outcomes["equal"] >= CONVERSATIONS and tokens[False] > 0
    (row,) = router.request("GET", "/workers")["workers"]
    assert (row["tokens"]["way"], row["tokens"]["problem"]) == (source, "")
