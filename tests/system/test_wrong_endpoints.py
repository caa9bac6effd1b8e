# SPDX-License-Identifier: Apache-2.0
"""Workers registered with the events of another rank or engine: a whole router, real sockets, simulated replicas."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.events.patch.messages import requests_endpoint
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.exchange import post
from tests.support.fake_engine import hashes, prompt
from tests.support.fleet import until
from tests.support.patched_engine import PatchedEngine, stores
from tests.support.router_process import RouterError, RouterProcess

MODEL = "sim"
TOKENS = list(range(96))
# All tokens but the last block, because vLLM computes one token at least.
HIT_TOKENS = 80
TIMEOUT_S = 30.0


class Fleet:
    def __init__(self, router: RouterProcess, replicas: list[ReplicaServer]) -> None:
        self.router = router
        self.replicas = replicas

    def register(self, worker_id: str, engine: int, events: int, rank: int = 0) -> None:
        """Register an engine's address with the events of another engine, or with its own."""
        url, stream = self.replicas[engine].endpoints["url"], self.replicas[events].endpoints
        body = {
            "worker_id": worker_id, "model": MODEL, "dp_rank": rank, "url": url, "endpoint": stream["events"],
            "replay_endpoint": stream["replay"],
        }  # fmt: skip
        self.router.request("POST", "/register", body)

    def row(self, worker_id: str, rank: int = 0) -> dict[str, Any]:
        rows = self.router.request("GET", "/workers")["workers"]
        return next(row for row in rows if (row["worker_id"], row["dp_rank"]) == (worker_id, rank))

    def gpu(self, worker_id: str, rank: int = 0) -> int:
        """Return the tokens that are credited to a worker for TOKENS."""
        body = {"model": MODEL, "token_ids": TOKENS, "explain": True}
        candidates = self.router.request("POST", "/select", body)["candidates"]
        return next(
            int(candidate["overlap"]["gpu"])
            for candidate in candidates
            if (candidate["worker_id"], candidate["dp_rank"]) == (worker_id, rank)
        )

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with contextlib.suppress(RouterError, StopIteration):
                if result := condition():
                    return result
            assert time.monotonic() < deadline, (
                f"not in {TIMEOUT_S:g} s: {what}; {self.router.request('GET', '/workers')}"
            )
            time.sleep(0.05)

    def compute(self, *engines: int) -> None:
        """Let each of these engines compute TOKENS, so that it has them cached."""
        for engine in engines:
            body = {"model": MODEL, "prompt": TOKENS, "max_tokens": 1}
            post(self.replicas[engine].endpoints["url"], "/v1/completions", body)

    def mismatched(self, worker_id: str, rank: int = 0) -> str:
        row = self.until(
            lambda: (worker_row := self.row(worker_id, rank))["state"] == "mismatched" and worker_row,
            f"{worker_id} is named",
        )
        assert self.gpu(worker_id, rank) == 0 and not row["credited"]
        reason = str(row["reason"])
        assert any(reason in line for line in self.router.request("GET", "/health")["reasons"])
        return reason

    def credited(self, worker_id: str, rank: int = 0) -> None:
        self.until(
            lambda: self.row(worker_id, rank)["state"] == "live" and self.gpu(worker_id, rank) == HIT_TOKENS,
            f"{worker_id} is credited",
        )


@pytest.fixture
def fleet(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Start one replica for each data-parallel rank in the test's parameter, and a router."""
    replicas = [
        ReplicaServer(make_geometry("llama"), 64, context=context, model=MODEL, dp_rank=rank) for rank in request.param
    ]
    thread = ServerThread(replicas)
    thread.start()
    try:
        with RouterProcess(tmp_path, []) as router:
            yield Fleet(router, replicas)
    finally:
        thread.stop()


@pytest.mark.parametrize("fleet", [(0, 1, 2)], indirect=True)
def test_a_stream_of_another_rank_is_named_and_earns_nothing(fleet: Fleet) -> None:
    fleet.compute(0, 1, 2)
    fleet.register("w", 0, 0, rank=0)
    # Register as if one address had both ranks; the events are those of rank 2.
    fleet.register("w", 0, 2, rank=1)
    reason = fleet.mismatched("w", 1)
    assert "publishes rank 2; it is registered as rank 1" in reason and "register the endpoint of rank 1" in reason
    assert fleet.router.metric("kvrouter_ingest_foreign_batches_total", worker="w@1") >= 1
    fleet.credited("w", 0)
    fleet.register("w", 0, 1, rank=1)
    fleet.credited("w", 1)


@pytest.mark.parametrize("fleet", [(3,)], indirect=True)
def test_the_only_core_behind_an_address_may_have_any_rank(fleet: Fleet) -> None:
    """Register an engine of rank 3 as its own worker.

    vLLM's external load balancing starts it with `--data-parallel-rank 3`.
    """
    fleet.compute(0)
    fleet.register("w", 0, 0)
    fleet.credited("w")


@pytest.mark.parametrize("fleet", [(0, 0)], indirect=True)
def test_swapped_and_shared_endpoints_are_named_and_earn_nothing(fleet: Fleet) -> None:
    fleet.compute(0, 1)
    fleet.register("w0", 0, 1)
    fleet.register("w1", 1, 0)
    assert "is that of w1, by the word of the engine there" in fleet.mismatched("w0")
    assert "is that of w0, by the word of the engine there" in fleet.mismatched("w1")
    # Mend one worker: now both have the stream of w0, and the engines say whose it is.
    fleet.register("w0", 0, 0)
    fleet.credited("w0")
    assert "is that of w0, by the word of the engine there" in fleet.mismatched("w1")
    fleet.register("w1", 1, 1)
    fleet.credited("w1")
    assert fleet.router.request("GET", "/health")["reasons"] == []


def test_two_streams_of_one_patched_publisher_are_one_engine(
    router: RouterProcess, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Register one address in two spellings.

    Only the publisher's epoch shows that both are one engine.
    """
    engine = PatchedEngine(context)
    try:
        port = str(requests_endpoint(engine.endpoint)).rpartition(":")[2]
        chain = hashes(prompt(5))
        engine.report(stores(chain))
        for worker_id, host in (("w0", "127.0.0.1"), ("w1", "127.1")):
            body = {"worker_id": worker_id, "model": "m", "patch_endpoint": f"tcp://{host}:{port}"}
            router.request("POST", "/register", body | {"url": f"http://127.0.0.1:{ord(worker_id[-1])}"})
            router.wait_connected(worker_id)
        for worker_id in ("w0", "w1"):
            router.wait_row(worker_id, lambda row: row["state"] == "mismatched")
        assert "both have the publisher" in router.worker("w1")["reason"]
        assert router.query("m", "w0", tuple(prompt(5)), None)["gpu"] == 0
        router.unregister("w1")
        router.wait_row("w0", lambda row: row["state"] == "live")
        until(lambda: router.query("m", "w0", tuple(prompt(5)), None)["gpu"], "w0 is not credited")
    finally:
        engine.close()
