# SPDX-License-Identifier: Apache-2.0
"""A router whose lease went elsewhere commits nothing, says so, and goes on when it gets the worker back."""

from __future__ import annotations

from pathlib import Path

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from tests.support.fake_engine import NewEngine, hashes, prompt, removed, stored
from tests.support.router_process import RouterProcess
from tests.support.store_server import wait_stored

TOKENS = prompt(1)
MODEL = "m"


def test_a_lost_lease_is_noticed_and_survived(tmp_path: Path, new_engine: NewEngine) -> None:
    engine = new_engine()
    with RouterProcess(tmp_path) as router, router.store() as store:
        engine.join(router, "w0", MODEL)
        before = router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 12)))
        wait_stored(store, {WorkerKey(MODEL, "w0"): before["seq"]})
        worker = WorkerKey(MODEL, "w0")
        assert store.get(keys.lease(worker)) is not None
        # Take the lease as another router would; a lease without a number is none.
        number = store.hincrby(keys.meta(worker), keys.META_LEASE)
        store.set(keys.router_lease("another-router"), 1, px=5_000)
        store.set(keys.lease(worker), f"another-router:{number}")
        # No router reports that it follows the worker, so the state that this router knows is in doubt.
        row = router.wait_row("w0", lambda row: "no router follows this worker" in row["reason"])
        assert row["state"] == "suspect"
        seq = engine.publish(*removed(hashes(TOKENS)[6:]))
        assert store.hget(keys.meta(worker), keys.META_SEQ) == b"0"
        # The other router's lease runs out, and a replay makes up for the missed batches.
        row = router.wait_row("w0", lambda row: row["seq"] == seq and row["state"] == "live")
        assert row["epoch"] == before["epoch"]
        answer = router.request("POST", "/query", {"model": MODEL, "token_ids": TOKENS})["instances"]["w0"]
        assert answer["gpu"] == 96
        assert "Traceback" not in router.log_tail()
