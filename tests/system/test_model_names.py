# SPDX-License-Identifier: Apache-2.0
"""Aliases, LoRA adapters that engines list, and ranks, through the whole router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvrouter.router.model.kvcache.block_hash import HashSpace
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher, SegmentMemory
from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import BLOCK, SCHEME, FakeEngine, hashes, prompt, stored
from tests.support.fleet import until
from tests.support.router_process import RouterError, RouterProcess

BASE, ADAPTER, PATH = "base", "style", "/adapters/style"
TOKENS = prompt(3)


ROUTER_FLAGS = ["--model-alias", f"gpt={BASE}", "--model-alias", f"nice={ADAPTER}"]


@pytest.fixture
def https() -> Iterator[list[EngineHttp]]:
    servers = [EngineHttp(), EngineHttp()]
    yield servers
    for engine in servers:
        engine.stop()


def models(*adapters: str) -> bytes:
    rows: list[dict[str, Any]] = [{"id": BASE, "root": "/models/base", "parent": None}]
    rows += [{"id": name, "root": f"/adapters/{name}", "parent": BASE} for name in adapters]
    return json.dumps({"object": "list", "data": rows}).encode()


def lora_hashes() -> list[int]:
    hasher = PromptHasher(HashSpace(SCHEME, BLOCK, (ADAPTER, PATH), None), np.array(TOKENS, np.int64), SegmentMemory(0))
    while len(hasher.extend()):
        pass
    return [int(block_hash) for block_hash in hasher.hashes]


def test_an_adapter_that_engines_list_is_a_model_of_those_who_have_it(
    router: RouterProcess, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine], https: list[EngineHttp]
) -> None:
    https[0].pages["/v1/models"] = models(ADAPTER)
    https[1].pages["/v1/models"] = models()
    for number, http in enumerate(https):
        engines.append(FakeEngine(context))
        router.request("POST", "/register", engines[-1].registration(f"w{number}", BASE, url=http.url))
        router.wait_connected(f"w{number}")

    def ask(model: str) -> dict[str, int]:
        try:
            answer = router.request("POST", "/query", {"model": model, "token_ids": TOKENS})
        except RouterError as error:
            assert "unknown_model" in str(error)
            return {}
        return {worker: row["gpu"] for worker, row in answer["instances"].items()}

    until(lambda: ask(ADAPTER) != {}, "it never came to hold")
    # A dense block without the adapter proves the scheme; the adapter's own blocks are found by its path.
    seq = engines[0].publish(stored(TOKENS, 0, 2))
    chain = lora_hashes()
    assert chain != hashes(TOKENS)
    event = stored(TOKENS, 0, 8, chain=chain, lora_name=ADAPTER, extra_keys=[(ADAPTER,)] * 8)
    seq = engines[0].publish(event)
    router.wait_seen("w0", seq)
    assert ask(BASE) == ask("gpt") == {"w0": 2 * BLOCK, "w1": 0}
    assert ask(ADAPTER) == ask("nice") == {"w0": 8 * BLOCK}
    chosen = router.request("POST", "/select", {"model": "nice", "token_ids": TOKENS})
    assert (chosen["model"], chosen["worker_id"]) == (BASE, "w0")
    # Take the adapter away from one engine, and let the other one list it.
    https[0].pages["/v1/models"] = models()
    https[1].pages["/v1/models"] = models(ADAPTER)
    until(lambda: ask(ADAPTER).keys() == {"w1"}, "it never came to hold")
    https[1].pages["/v1/models"] = models()
    until(lambda: ask(ADAPTER) == {}, "it never came to hold")
    for number in range(2):
        router.unregister(f"w{number}")


def test_one_engine_with_ranks_is_queried_rank_by_rank(
    router: RouterProcess, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine], tmp_path: Path
) -> None:
    url = "http://127.0.0.1:9"
    for rank in range(2):
        engines.append(FakeEngine(context))
        engines[-1].dp_rank = rank
        router.request("POST", "/register", engines[-1].registration("dp", BASE, url=url, dp_rank=rank))

    def row(rank: int) -> dict[str, Any]:
        rows = router.request("GET", "/workers")["workers"]
        return next(row for row in rows if (row["worker_id"], row["dp_rank"]) == ("dp", rank))

    # Nothing answers at that URL: both are down until their events come, and none is queried for tokens.
    until(lambda: all(row(rank)["state"] != "connecting" for rank in range(2)), "it never came to hold")
    seqs = [engines[rank].publish(stored(TOKENS, 0, 3 + 3 * rank)) for rank in range(2)]
    until(
        lambda: all((-1 if row(rank)["seq"] is None else row(rank)["seq"]) >= seqs[rank] for rank in range(2)),
        "it never came to hold",
    )
    answer = router.request("POST", "/query", {"model": BASE, "token_ids": TOKENS})
    assert answer["scores"] == {"dp": {"0": 3 * BLOCK, "1": 6 * BLOCK}}
    router.unregister("dp")
