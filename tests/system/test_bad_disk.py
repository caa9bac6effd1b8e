# SPDX-License-Identifier: Apache-2.0
"""An engine whose disk returns bad data is named by every router, whichever of them follows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import FakeEngine
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

TIMEOUT_S = 30.0
BAD = "its offload disk returned bad data: 2 records"


def lists_one(router: RouterProcess) -> bool:
    return len(router.request("GET", "/workers")["workers"]) == 1


def health_says(router: RouterProcess, words: str) -> bool:
    return words in str(router.request("GET", "/health"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_live_and_named(router: RouterProcess) -> bool:
    row = router.worker("w0")
    return BAD in row["reason"] and row["state"] == "live" and row["credited"]


def test_a_disk_that_returns_bad_data_is_named_by_every_router(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine], server: StoreServer
) -> None:
    engine = FakeEngine(context)
    engines.append(engine)
    http = EngineHttp()
    routers = [RouterProcess(tmp_path / name, ["--redis", server.url]) for name in ("a", "b")]
    try:
        with routers[0], routers[1]:
            routers[0].request("POST", "/register", engine.registration("w0", "m", url=http.url))
            for router in routers:
                until(partial(lists_one, router))
                router.wait_connected("w0")
                assert "disk" not in str(router.request("GET", "/health"))
            http.metrics = b'vllm:kvrouter_offload_disk_corrupt_total{engine="0"} 2.0\n'
            for router in routers:
                until(partial(health_says, router, f"worker w0 (rank 0): {BAD}"))
                until(partial(is_live_and_named, router))
            assert 2.0 in [router.metric("kvrouter_worker_disk_corrupt_records", worker="w0") for router in routers]
    finally:
        http.stop()
