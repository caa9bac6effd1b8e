# SPDX-License-Identifier: Apache-2.0
"""A router whose lease went elsewhere commits nothing, says so, and goes on when it gets the worker back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import redis
import zmq
from fake_engine import FakeEngine, hashes, prompt, removed, stored
from router_process import RouterProcess

TOKENS = prompt(1)
MODEL = "m"
# Several times the default lease (1.5 s).
WAIT_S = 15.0


def until(router: RouterProcess, reached: Any) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while not reached(row := router.worker("w0")):
        assert time.monotonic() < deadline, row
        time.sleep(0.05)
    return row


def test_a_lost_lease_is_noticed_and_survived(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine]
) -> None:
    engine = FakeEngine(context)
    engines.append(engine)
    with RouterProcess(tmp_path) as router:
        router.request("POST", "/register", engine.registration("w0", MODEL))
        router.wait_connected("w0")
        before = router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 12)))
        store = redis.Redis(unix_socket_path=str(next((tmp_path / "data").glob("*.sock"))))
        lease = f"kvr:{{{MODEL}/w0}}:lease"
        assert store.get(lease) is not None
        store.set(lease, "another-router", px=4_000)
        row = until(router, lambda row: "another router process" in row["reason"])
        seq = engine.publish(*removed(hashes(TOKENS)[6:]))
        assert store.hget(f"kvr:{{{MODEL}/w0}}:meta", "seq") == b"0"
        # The other's lease runs out; what was missed is made up by replay.
        row = until(router, lambda row: row["seq"] == seq)
        assert row["epoch"] == before["epoch"] and row["state"] == "live"
        answer = router.request("POST", "/query", {"model": MODEL, "token_ids": TOKENS})["instances"]["w0"]
        assert answer["gpu"] == 96
        assert "Traceback" not in router.log_tail()
        store.close()
