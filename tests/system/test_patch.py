# SPDX-License-Identifier: Apache-2.0
"""A router in front of engines with the patch: snapshots, heartbeats, clears, restarts; the patch comes and goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.events.patch.messages import DeclaredGroup, ReportCleared
from tests.support.fake_engine import FakeEngine, hashes, prompt, stored
from tests.support.fleet import until
from tests.support.patched_engine import PatchedEngine, catalog, removes, stores
from tests.support.report_peer import said
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.smoke

MODEL = "m"
TOKENS = prompt(1)
CHAIN = hashes(TOKENS)
WAIT_S = 30.0


@pytest.fixture
def engine(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[PatchedEngine]:
    patched_engine = PatchedEngine(context)
    yield patched_engine
    patched_engine.close()


def ask(router: RouterProcess, worker: str = "w0", what: str = "gpu") -> int:
    answer = router.request("POST", "/query", {"model": MODEL, "token_ids": TOKENS})["instances"]
    return int(answer[worker][what])


def proven(row: dict[str, Any]) -> bool:
    return row["state"] == "live" and row["patch"] is not None and row["patch"]["heartbeats"] > 0


def at(seq: int) -> Callable[[dict[str, Any]], bool]:
    """Return the condition that the row is proven and its answers show message `seq`."""
    return lambda row: proven(row) and row["seq"] == seq


def register(router: RouterProcess, engine: FakeEngine, worker: str = "w0", **more: Any) -> None:
    router.request("POST", "/register", engine.registration(worker, MODEL, **more))


@pytest.fixture
def fresh(router: RouterProcess) -> Iterator[RouterProcess]:
    """Yield the module's router without workers, and unregister the test's workers at the end."""
    yield router
    for row in router.request("GET", "/workers")["workers"]:
        router.unregister(row["worker_id"])


def test_a_late_router_has_the_whole_residency_by_snapshot(fresh: RouterProcess, engine: PatchedEngine) -> None:
    for i in range(200):
        engine.report(stores(CHAIN[:6]), stores([i + 1]), removes([i + 1]))
    engine.report(*[removes(CHAIN[:6])] * 199, stores(CHAIN[6:9]), stores(CHAIN[:9], medium="CPU"))
    register(fresh, engine)
    row = fresh.wait_row("w0", at(200))
    assert row["catalog_source"] == "declared" and row["hash_scheme"].endswith("(verified)")
    assert row["residency"] == {"g0:CPU": 9, "g0:GPU": 9}
    assert row["patch"]["version"] == "test" and row["patch"]["mismatches"] == 0 and row["patch"]["snapshots"] == 1
    assert ask(fresh) == 9 * 16
    fresh.wait_seen("w0", engine.report(removes(CHAIN[5:6])))
    assert ask(fresh) == 5 * 16


def test_a_clear_of_one_medium_leaves_the_other(fresh: RouterProcess, engine: PatchedEngine) -> None:
    engine.unpatch()
    engine.patch(catalog(DeclaredGroup(0, "full_attention", 16), offload_blocks_per_chunk=1))
    engine.report(stores(CHAIN[:4]), stores(CHAIN[:8], medium="CPU"))
    register(fresh, engine)
    fresh.wait_row("w0", at(0))
    assert (ask(fresh), ask(fresh, what="cpu")) == (64, 128)
    fresh.wait_seen("w0", engine.report(ReportCleared("GPU", "reset")))
    assert (ask(fresh), ask(fresh, what="cpu")) == (0, 128)
    fresh.wait_seen("w0", engine.report(ReportCleared("CPU", "reset")))
    assert (ask(fresh), ask(fresh, what="cpu")) == (0, 0)


def test_a_new_life_of_the_patch_voids_and_loads_again(fresh: RouterProcess, engine: PatchedEngine) -> None:
    engine.report(stores(CHAIN[:4]))
    register(fresh, engine)
    before = fresh.wait_row("w0", at(0))
    assert ask(fresh) == 64
    engine.unpatch()
    engine.patch()
    engine.report(stores(CHAIN[:2]))
    # `patch` shows the last report that was heard, `epoch` and `seq` the state that the answers show.
    row = fresh.wait_row("w0", lambda row: at(0)(row) and row["epoch"] != before["epoch"])
    assert ask(fresh) == 32 and row["residency"] == {"g0:GPU": 2}
    assert row["patch"]["epoch"] != before["patch"]["epoch"]


def test_a_dropped_message_is_healed_by_a_snapshot(
    fresh: RouterProcess, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    engine = PatchedEngine(context, patched=False)
    try:
        engine.patch(max_queue_size=1)
        register(fresh, engine)
        fresh.wait_row("w0", proven)

        begun, queued = threading.Event(), threading.Event()

        def slow() -> list[Any]:
            begun.set()
            assert queued.wait(WAIT_S)
            return [stores(CHAIN[:1])]

        assert engine.reporter is not None
        engine.reporter.publish(slow, 0)
        assert begun.wait(WAIT_S)
        for i in range(1, 9):
            engine.reporter.publish(said(stores(CHAIN[i : i + 1])), i)
        queued.set()
        row = fresh.wait_row("w0", lambda row: proven(row) and row["residency"].get("g0:GPU") == 9 and row["seq"] == 8)
        assert engine.reporter.counters.dropped > 0 and row["gaps"] >= 1 and ask(fresh) == 144
    finally:
        engine.close()


def test_two_routers_follow_one_patch_at_once(fresh: RouterProcess, engine: PatchedEngine, tmp_path: Path) -> None:
    engine.report(stores(CHAIN[:7]))
    with RouterProcess(tmp_path) as second:
        for router in (fresh, second):
            register(router, engine)
        for router in (fresh, second):
            router.wait_row("w0", at(0))
            assert ask(router) == 112


def test_a_restarted_router_continues_without_a_snapshot(engine: PatchedEngine, tmp_path: Path) -> None:
    engine.report(stores(CHAIN[:7]))
    with RouterProcess(tmp_path) as first:
        register(first, engine)
        first.wait_row("w0", at(0))
    with RouterProcess(tmp_path) as second:
        row = second.wait_row("w0", proven)
        assert row["patch"]["snapshots"] == 0 and row["residency"] == {"g0:GPU": 7} and ask(second) == 112
        assert row["catalog_source"] == "declared"


def test_what_a_restarted_router_missed_comes_by_snapshot(engine: PatchedEngine, tmp_path: Path) -> None:
    engine.report(stores(CHAIN[:7]))
    with RouterProcess(tmp_path) as first:
        register(first, engine)
        first.wait_row("w0", at(0))
    engine.report(removes(CHAIN[3:7]))
    with RouterProcess(tmp_path) as second:
        row = second.wait_row("w0", at(1))
        assert row["patch"]["snapshots"] == 1 and ask(second) == 48


def test_a_patch_that_appears_later_is_found(fresh: RouterProcess, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    engine = PatchedEngine(context, patched=False)
    try:
        engine.publish(stored(TOKENS, 0, 4))
        register(fresh, engine)
        row = fresh.wait_row("w0", lambda row: row["state"] == "live" and row["seq"] == 0)
        assert row["patch"] is None and row["catalog_source"] == "learned" and ask(fresh) == 64
        engine.patch()
        engine.report(stores(CHAIN[:5]))
        row = fresh.wait_row("w0", at(0))
        assert row["catalog_source"] == "declared" and ask(fresh) == 80
    finally:
        engine.close()


def test_a_patch_that_is_not_wanted_is_not_used(fresh: RouterProcess, engine: PatchedEngine) -> None:
    engine.publish(stored(TOKENS, 0, 4))
    engine.report(stores(CHAIN[:5]))
    register(fresh, engine, patch_endpoint="off")
    row = fresh.wait_row("w0", lambda row: row["state"] == "live" and row["seq"] == 0)
    time.sleep(1.5)
    assert fresh.worker("w0")["patch"] is None and row["catalog_source"] == "learned" and ask(fresh) == 64


def test_an_engine_that_falls_silent_is_suspect_and_keeps_its_credit(
    fresh: RouterProcess, engine: PatchedEngine
) -> None:
    engine.report(stores(CHAIN[:4]))
    register(fresh, engine)
    fresh.wait_row("w0", at(0))
    engine.unpatch()
    row = fresh.wait_row("w0", lambda row: row["state"] == "suspect")
    assert row["reason"] and ask(fresh) == 64


def test_a_patch_that_failed_earns_nothing_and_the_engines_own_events_are_followed(
    fresh: RouterProcess, engine: PatchedEngine
) -> None:
    engine.publish(stored(TOKENS, 0, 3))
    engine.report(stores(CHAIN[:9]), stores(CHAIN[:9], medium="CPU"))
    register(fresh, engine)
    fresh.wait_row("w0", at(0))
    assert ask(fresh) == 144 and engine.reporter is not None
    engine.reporter.withhold(Scope.EVERYTHING, "components: failed")
    row = fresh.wait_row("w0", lambda row: row["patch"] is None and row["state"] == "live")
    assert "the engine's patch no longer reports anything (components: failed)" in row["reason"]
    assert row["residency"] == {"g0:GPU": 3} and ask(fresh) == 48
    assert fresh.metric("kvrouter_patch_withheld", worker="w0") == 1
    # The engine's next life has the patch again.
    engine.unpatch()
    engine.restart()
    engine.patch()
    engine.report(stores(CHAIN[:5]))
    row = fresh.wait_row("w0", at(0))
    assert not row["reason"] and ask(fresh) == 80 and fresh.metric("kvrouter_patch_withheld", worker="w0") == 0


def test_tiers_that_are_no_longer_kept_up_earn_nothing(fresh: RouterProcess, engine: PatchedEngine) -> None:
    engine.unpatch()
    engine.patch(catalog(DeclaredGroup(0, "full_attention", 16), offload_blocks_per_chunk=1))
    engine.report(stores(CHAIN[:4]), stores(CHAIN[:8], medium="CPU"))
    register(fresh, engine)
    fresh.wait_row("w0", at(0))
    assert (ask(fresh), ask(fresh, what="cpu")) == (64, 128) and engine.reporter is not None
    engine.reporter.withhold(Scope.TIERS, "offload_resets: failed")
    row = fresh.wait_row("w0", lambda row: "offload_resets: failed" in row["reason"])
    assert row["state"] == "live" and row["credited"] and row["residency"] == {"g0:CPU": 0, "g0:GPU": 4}
    assert row["patch"] is not None and (ask(fresh), ask(fresh, what="cpu")) == (64, 64)
    assert fresh.metric("kvrouter_patch_withheld", worker="w0") == 1


def test_an_index_that_differs_is_found_by_the_heartbeat_and_replaced(
    fresh: RouterProcess, engine: PatchedEngine
) -> None:
    engine.report(stores(CHAIN[:8]))
    register(fresh, engine)
    fresh.wait_row("w0", at(0))
    assert ask(fresh) == 128 and engine.reporter is not None
    # Change the ledger without a message. The ledger is the truth here, as it is when a reader has miscounted.
    engine.reporter._stream.ledger.apply(removes(CHAIN[3:4]))
    row = fresh.wait_row("w0", lambda row: row["patch"]["mismatches"] > 0 and row["state"] == "live")
    until(lambda: ask(fresh) == 48, "the index is not replaced")
    assert row["patch"]["mismatches"] == 1 and fresh.worker("w0")["residency"] == {"g0:GPU": 7}
    assert fresh.metric("kvrouter_patch_mismatches_total", worker="w0") >= 1
