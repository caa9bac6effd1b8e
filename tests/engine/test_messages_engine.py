# SPDX-License-Identifier: Apache-2.0
"""Messages of Anthropic's API through `kvrouter serve` to real vLLM servers.

The router's prediction equals the reuse that the engine reports.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_fleet import MODEL, WAIT_S, Fleet, chat_fleet, until
from tests.engine.chat_model import write_chat_model
from tests.support.anthropic_bodies import message

pytestmark = pytest.mark.engine

CONVERSATIONS = 24
JSON = {"content-type": "application/json"}
# Some blocks of 128 tokens.
LONG = "the cache of an engine keeps what it computed " * 24


@pytest.fixture(scope="module", params=[(), ("--enable-scale-out",)], ids=["tokenize", "render"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("messages")
    with chat_fleet(folder, write_chat_model(folder / "model"), request.param) as running:
        # The first message makes the router verify the engines.
        hello = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
        until(lambda: ask(running, hello)[0] is not None, "tokens of messages are known")
        yield running


def ask(fleet: Fleet, body: dict[str, Any]) -> tuple[int | None, int, int]:
    """Return the predicted hit, the tokens that the engine reused, and the length of the prompt."""
    data = json.dumps(body | {"model": MODEL}).encode()
    url = f"http://127.0.0.1:{fleet.router.port}/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, data, JSON), timeout=WAIT_S) as answer:
        usage = json.loads(answer.read())["usage"]
        hit = answer.headers["x-kvrouter-predicted-hit"]
    reused = usage.get("cache_read_input_tokens") or 0
    whole = usage["input_tokens"] + reused + (usage.get("cache_creation_input_tokens") or 0)
    return None if hit is None else int(hit), reused, whole


def test_what_is_predicted_is_reused(
    fleet: Fleet, seed: int, table: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    tokens = 0
    wrong = []
    for _ in range(CONVERSATIONS):
        body = message(rng) | {"max_tokens": 4}
        body.pop("thinking", None)
        body["system"] = [{"type": "text", "text": LONG + str(rng.random())}]
        turns = body["messages"]
        # Send the conversation as it grew: each turn of the client is a request.
        ends = [n for n, turn in enumerate(turns) if turn["role"] == "user"]
        for end in ends:
            fleet.settle()
            request_body = body | {"messages": turns[: end + 1]}
            predicted, reused, whole = ask(fleet, request_body)
            outcomes["unknown" if predicted is None else "equal" if predicted == reused else "wrong"] += 1
            tokens += reused
            if predicted != reused:
                wrong.append(f"seed {seed}: predicted {predicted}, reused {reused} of {whole}\n{request_body}")
    table(
        "Messages of Anthropic's API (vllm serve, tiny hybrid model, two engines)",
        ("way", "requests", "equal", "reused tokens"),
        (request.node.callspec.id, str(outcomes.total()), str(outcomes["equal"]), str(tokens)),
    )
    assert not wrong, "\n".join(wrong[:3])
    assert outcomes["equal"] >= CONVERSATIONS and tokens > 0
