# SPDX-License-Identifier: Apache-2.0
"""An engine whose disk returns bad data is named by every router, whichever of them follows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import NewEngine
from tests.support.fleet import until
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

BAD = "its offload disk returned bad data: 2 records"


def lists_one(router: RouterProcess) -> bool:
    return len(router.request("GET", "/workers")["workers"]) == 1


def health_says(router: RouterProcess, words: str) -> bool:
    return words in str(router.request("GET", "/health"))


def is_live_and_named(router: RouterProcess) -> bool:
    row = router.worker("w0")
    return BAD in row["reason"] and row["state"] == "live" and row["credited"]


def test_a_disk_that_returns_bad_data_is_named_by_every_router(
    tmp_path: Path, new_engine: NewEngine, server: StoreServer
) -> None:
    engine = new_engine()
    http = EngineHttp()
    routers = [RouterProcess(tmp_path / name, ["--redis", server.url]) for name in ("a", "b")]
    try:
        with routers[0], routers[1]:
            routers[0].request("POST", "/register", engine.registration("w0", "m", url=http.url))
            for router in routers:
                until(partial(lists_one, router), "lists_one")
                router.wait_connected("w0")
                assert "disk" not in str(router.request("GET", "/health"))
            http.metrics = b'vllm:kvrouter_offload_disk_corrupt_total{engine="0"} 2.0\n'
            for router in routers:
                until(partial(health_says, router, f"worker w0 (rank 0): {BAD}"), "health_says")
                until(partial(is_live_and_named, router), "is_live_and_named")
            assert 2.0 in [router.metric("kvrouter_worker_disk_corrupt_records", worker="w0") for router in routers]
    finally:
        http.stop()
