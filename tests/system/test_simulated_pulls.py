# SPDX-License-Identifier: Apache-2.0
"""Replicas of the simulator that fetch from each other because the router names the source, as simulator.md says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from kvrouter.simulator.cache.peer import Lender
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.http.server import ReplicaServer
from tests.support.fleet import until, wait_live
from tests.support.replica_process import served
from tests.support.router_process import RouterProcess

MODEL = "sim"
TOKENS = 3_000
# The gemma3 shape has blocks of 16 tokens, and no prompt is reused whole.
REUSED = (TOKENS - 1) // 16 * 16
TIER = "offload_connector=OffloadingConnector,offload_blocks_per_chunk=1"


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1_000, 30_000), k=TOKENS)


def test_a_replica_fetches_what_another_one_holds(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    geometry = make_geometry("gemma3")
    timing = Timing().lending(geometry, 20e9, 0.001)
    lenders: dict[int, Callable[[], Lender | None]] = {}
    servers = [
        ReplicaServer(geometry, 2_048, context=context, model=MODEL, timing=timing, cpu_chunks=4_096, lenders=lenders)
        for _ in range(2)
    ]
    workers = [
        part
        for number, server in enumerate(servers)
        for part in ("--worker", f"w{number}={server.endpoints['url']},peer={server.endpoints['peer']},{TIER}")
    ]
    with served(*servers), RouterProcess(tmp_path, workers) as router:
        wait_live(router)

        def complete(worker: str, token_ids: list[int]) -> int:
            body = {"model": MODEL, "prompt": token_ids, "max_tokens": 2}
            answer = router.request("POST", "/v1/completions", body, headers={"x-kvrouter-worker": worker})
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        def peer() -> Any:
            answer = router.request("POST", "/query", {"model": MODEL, "token_ids": prompt(0)})
            return answer["instances"]["w1"].get("peer")

        # The second shows the router the groups of `w1`.
        assert complete("w0", prompt(0)) == complete("w1", prompt(1)) == 0
        expected = {"worker_id": "w0", "dp_rank": 0, "tokens": REUSED}
        until(lambda: peer() == expected, "the source is found")
        assert complete("w1", prompt(0)) == REUSED
        until(lambda: router.metric("kvrouter_peer_pulls_total", worker="w1", outcome="whole") == 1, "it is judged")
        assert servers[1].replica.offload.peer_counts.pulled  # type: ignore[union-attr]
