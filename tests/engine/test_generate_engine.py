# SPDX-License-Identifier: Apache-2.0
"""vLLM's path for token ids behind `kvrouter serve`: each prediction is the reuse that the engine reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.chat_model import write_chat_model
from tests.engine.chat_server import ChatServer
from tests.support.exchange import exchange
from tests.support.fleet import settle, wait_live
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

PATH = "/inference/v1/generate"
REQUESTS = 24
# A prompt of this length begins a new conversation.
LONG_TOKENS = 900


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder = tmp_path_factory.mktemp("generate")
    # A small share of the memory is enough for the blocks of the tiny model.
    flags = ("--enable-scale-out", "--gpu-memory-utilization", "0.2")
    with (
        ChatServer(folder, write_chat_model(folder / "model"), flags) as engine,
        RouterProcess(folder / "router", ["--worker", engine.spec("w0")]) as started,
    ):
        ask(started, token_ids=[5] * 300, sampling_params={"max_tokens": 1})
        wait_live(started)
        yield started


def ask(router: RouterProcess, **body: Any) -> tuple[int, int]:
    """Return the predicted hit, and the tokens that the engine reports as reused."""
    answer = exchange(router.port, "POST", PATH, body)
    assert answer.status == 200, (answer.status, answer.content[:500])
    events = [
        line.removeprefix(b"data: ") for line in answer.content.splitlines() if line not in (b"", b"data: [DONE]")
    ]
    details = json.loads(events[-1])["usage"]["prompt_tokens_details"]
    return int(answer.headers["x-kvrouter-predicted-hit"]), 0 if details is None else details["cached_tokens"]


def test_what_is_predicted_for_ids_is_reused(router: RouterProcess, seed: int) -> None:
    rng, ids, reused = Random(seed), list[int](), 0
    for number in range(REQUESTS):
        if len(ids) > LONG_TOKENS:
            ids.clear()
        ids += [rng.randrange(10, 200) for _ in range(130)]
        body: dict[str, Any] = {"token_ids": ids, "sampling_params": {"max_tokens": 2}}
        if number % 4 == 1:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        elif number % 4 == 2:
            # The engine then computes all of the prompt.
            body["sampling_params"]["prompt_logprobs"] = 0
        elif number % 4 == 3:
            body["cache_salt"] = "mine"
        settle(router)
        predicted, delivered = ask(router, **body)
        assert predicted == delivered, f"seed {seed}, request {number} of {len(ids)} tokens"
        reused += delivered
    assert reused > 1_000
    assert router.request("GET", "/health")["status"] == "ok"
