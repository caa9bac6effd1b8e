# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/responses` to a real vLLM without render endpoints: the predicted reuse is what the engine reports.

One router uses the engine's `/tokenize`, which cannot write the template's whole tool calls as the engine does, and
another one has the model's tokenizer.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

pytest.importorskip("vllm")

from tests.engine.chat_fleet import MODEL, TOKENIZE_TIMEOUT_S, WAIT_S, Fleet, chat_fleet, until
from tests.engine.chat_model import write_chat_model
from tests.support.clinic import Clinic
from tests.support.responses_bodies import response
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

CONVERSATIONS = 11
JSON = {"content-type": "application/json"}
# Some blocks of 128 tokens.
LONG = "the cache of an engine keeps what it computed " * 24


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Fleet]]:
    folder = tmp_path_factory.mktemp("responses")
    model = write_chat_model(folder / "model")
    with chat_fleet(folder, model, servers=1) as tokenize, zmq.Context() as context:
        flags = ["--tokenize-timeout-s", str(TOKENIZE_TIMEOUT_S), "--tokenizer", f"{MODEL}={model}"]
        flags += ["--worker", tokenize.engines["w0"].spec("w0")]
        with RouterProcess(folder / "local", flags) as router:
            fleets = {"tokenize": tokenize, "local": Fleet(router, tokenize.engines, context)}
            for fleet in fleets.values():
                until(lambda fleet=fleet: ask(fleet, {"input": LONG})[0] is not None, "tokens of Responses are known")  # type: ignore[misc]
            yield fleets


def ask(fleet: Fleet, body: dict[str, Any]) -> tuple[int | None, int]:
    """Return the predicted hit, or None without a prediction, and the tokens that the engine reused."""
    data = json.dumps(body | {"model": MODEL, "max_output_tokens": 2}).encode()
    url = f"http://127.0.0.1:{fleet.router.port}/v1/responses"
    with urllib.request.urlopen(urllib.request.Request(url, data, JSON), timeout=WAIT_S) as answer:
        reused = json.loads(answer.read())["usage"]["input_tokens_details"]["cached_tokens"]
        hit = answer.headers["x-kvrouter-predicted-hit"]
    return None if hit is None else int(hit), reused


def grown(rng: random.Random, *, kinds: bool) -> Iterator[dict[str, Any]]:
    """Yield a conversation as it grows: each time that it is the engine's turn is a request."""
    body = response(rng, kinds=kinds)
    body["instructions"] = LONG + str(rng.random())
    items = body["input"]
    if isinstance(items, str):
        yield body
        return
    for end, item in enumerate(items):
        kind = item.get("type", "message")
        if item.get("role") == "user" or (kind.endswith("_output") and item is items[-1]):
            yield body | {"input": items[: end + 1]}


@pytest.mark.parametrize("way", ["tokenize", "local"])
def test_what_is_predicted_is_reused(way: str, fleets: dict[str, Fleet], seed: int, table: Callable[..., None]) -> None:
    fleet = fleets[way]
    rng = random.Random(f"{seed}-{way}")
    outcomes: Counter[str] = Counter()
    tokens = 0
    wrong = []
    for _ in range(CONVERSATIONS):
        for body in grown(rng, kinds=way == "local"):
            fleet.settle()
            predicted, reused = ask(fleet, body)
            calls = "_call'" in str(body["input"])
            outcomes["unknown" if predicted is None else "equal" if predicted == reused else "wrong"] += 1
            tokens += reused
            # /tokenize cannot write whole calls as the engine does, and the router leaves calls beside a developer's message to
            # the engine.
            may_be_unknown = calls and (way == "tokenize" or "'developer'" in str(body["input"]))
            if predicted != reused and not (predicted is None and may_be_unknown):
                wrong.append(f"seed {seed}: predicted {predicted}, reused {reused}\n{body}")
    table(
        "Responses without render endpoints (vllm serve, tiny hybrid model, one engine)",
        ("way", "requests", "equal", "unknown", "reused tokens"),
        (way, str(outcomes.total()), str(outcomes["equal"]), str(outcomes["unknown"]), str(tokens)),
    )
    assert not wrong, "\n".join(wrong[:3])
    assert outcomes["equal"] >= CONVERSATIONS and tokens > 0


def test_the_doctor_names_the_responses_that_are_placed_by_load_and_the_remedy(fleets: dict[str, Fleet]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    body = {"input": [call, {"type": "function_call_output", "call_id": "c", "output": "21"}]}
    for fleet in fleets.values():
        ask(fleet, body)
    finding = Clinic(fleets["tokenize"].router).find("KV409", f"model {MODEL}")
    assert "with calls of functions" in finding.evidence and "--enable-scale-out" in finding.fix
    assert "KV409" not in Clinic(fleets["local"].router).codes()
