# SPDX-License-Identifier: Apache-2.0
"""A router that comes back on its data directory.

It has the same workers, gives the same answers, and is honest about the batches that it missed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.peer_view import META_ENGINE_START
from kvrouter.router.index.store import keys
from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import FakeEngine, NewEngine, hashes, prompt, removed, stored
from tests.support.router_process import RouterProcess
from tests.support.store_server import wait_stored

TOKENS = prompt(1)
OTHER = prompt(2)
MODEL = "m"
WORKER = WorkerKey(MODEL, "w0")
# Nothing here waits this long unless it fails.
WAIT_S = 30.0


def ask(router: RouterProcess, tokens: list[int] = TOKENS) -> dict[str, Any]:
    answer = router.request("POST", "/query", {"model": MODEL, "token_ids": tokens})["instances"]
    return {worker: row["longest_matched"] for worker, row in answer.items()}


def fill(router: RouterProcess, engine: FakeEngine) -> dict[str, Any]:
    """Fill a worker with twelve blocks, one of them stored twice, and return its row.

    The blocks are learned from the stream, and are in Redis at the end.
    """
    engine.join(router, "w0", MODEL, url="http://127.0.0.1:1")
    engine.publish(stored(TOKENS, 0, 12), stored(TOKENS, 11, 12))
    row = router.wait_seen("w0", engine.publish(stored(OTHER, 0, 2)))
    assert ask(router) == {"w0": 192}
    with router.store() as store:
        wait_stored(store, {WORKER: row["seq"]})
    return row


def signal_store(folder: Path, number: int) -> list[int]:
    """Signal the embedded store, found by its data directory, and return its pids."""
    pgrep = subprocess.run(["pgrep", "-f", f"valkey-server.*{folder}"], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in pgrep.stdout.split()]
    if not pids:
        pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _works_in(p, folder)]
    assert pids, "no embedded store found"
    for pid in pids:
        os.kill(pid, number)
    return pids


def kill_store(router: RouterProcess, folder: Path) -> None:
    """Kill the embedded store with SIGKILL once its log is written, and wait until it is gone."""
    with router.store() as store:
        while (persistence := store.info("persistence"))["aof_buffer_length"] or persistence["aof_pending_bio_fsync"]:
            time.sleep(0.01)
    pids = signal_store(folder, signal.SIGKILL)
    while any(_works_in(Path(f"/proc/{pid}"), folder) for pid in pids):
        time.sleep(0.01)


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return "valkey" in (process / "comm").read_text() and (process / "cwd").readlink().is_relative_to(folder)
    except OSError:
        return False


@pytest.mark.parametrize("how", ["stop", "kill", "kill with its store"])
def test_same_workers_and_answers_with_the_engine_silent(how: str, tmp_path: Path, new_engine: NewEngine) -> None:
    engine = new_engine(replay=False)
    with RouterProcess(tmp_path) as router:
        before = fill(router, engine)
        if how != "stop":
            router.kill()
        if how == "kill with its store":
            kill_store(router, tmp_path)
    # Otherwise the subscription of the dead router may pass for that of the next one.
    engine.wait_subscribed(False)
    with RouterProcess(tmp_path) as router:
        states = set()

        def is_restored(row: dict[str, Any]) -> bool:
            states.add(row["state"])
            return "nothing was missed" in row["reason"]

        # Until the lease is taken, the reason says that nobody has it.
        row = router.wait_row("w0", is_restored, "restored")
        assert states == {"suspect"}
        for same in ("epoch", "seq", "residency", "catalog", "hash_scheme", "url", "model", "gaps"):
            assert row[same] == before[same], same
        assert ask(router) == {"w0": 192} and ask(router, OTHER) == {"w0": 32}
        router.wait_connected("w0", engine.wait_subscribed)
        assert router.worker("w0")["state"] == "suspect"
        # The batch has the next seq, which another life can reach accidentally, so the worker stays in doubt. The
        # twelfth block had two copies, and one is left.
        seq = engine.publish(*removed(hashes(TOKENS)[11:]))
        row = router.wait_row("w0", lambda row: row["seq"] == seq and "HTTP" in row["reason"])
        assert row["state"] == "suspect" and row["epoch"] == before["epoch"]
        assert ask(router) == {"w0": 192}


def test_what_was_missed_is_made_up_by_replay(tmp_path: Path, new_engine: NewEngine) -> None:
    engine = new_engine()
    with RouterProcess(tmp_path) as router:
        before = fill(router, engine)
        router.kill()
        engine.publish(*removed(hashes(TOKENS)[6:]))
        missed = engine.publish(*removed(hashes(TOKENS)[11:]))
    with RouterProcess(tmp_path) as router:
        row = router.wait_seen("w0", missed)
        assert row["epoch"] == before["epoch"]
        assert ask(router) == {"w0": 96}
        assert router.worker("w0")["state"] == "live"


@pytest.mark.parametrize("replay", [True, False])
def test_what_a_killed_router_had_not_written_is_credited_as_the_engine_has_it(
    replay: bool, tmp_path: Path, new_engine: NewEngine
) -> None:
    """Kill a router whose answers are ahead of Redis.

    For the next router, the batches that were not written are missed ones like any others.
    """
    engine = new_engine(replay=replay)
    with RouterProcess(tmp_path) as router:
        before = fill(router, engine)
        signal_store(tmp_path, signal.SIGSTOP)
        try:
            # The first commit may be on its way to the store when the router ends; the second waits for it.
            router.wait_seen("w0", engine.publish(*removed(hashes(TOKENS)[11:])))
            time.sleep(0.2)
            last = router.wait_seen("w0", engine.publish(*removed(hashes(TOKENS)[6:]), *removed(hashes(OTHER)[1:])))
            assert ask(router) == {"w0": 96} and ask(router, OTHER) == {"w0": 16}
            router.kill()
        finally:
            signal_store(tmp_path, signal.SIGCONT)
    # Otherwise the subscription of the dead router may pass for that of the next one.
    engine.wait_subscribed(False)
    with RouterProcess(tmp_path) as router:
        if replay:
            row = router.wait_seen("w0", last["seq"])
            assert row["epoch"] == before["epoch"] and ask(router) == {"w0": 96} and ask(router, OTHER) == {"w0": 16}
        else:
            # Nothing proves the blocks in Redis, and the router says so. The next batch shows the gap, which voids
            # them.
            row = router.worker("w0")
            assert row["state"] == "suspect" and row["seq"] < last["seq"]
            router.wait_connected("w0", engine.wait_subscribed)
            row = router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 3)))
            assert row["epoch"] != before["epoch"] and row["gaps"] == 1
            assert ask(router) == {"w0": 48} and ask(router, OTHER) == {"w0": 0}


def test_what_was_missed_and_cannot_be_had_voids(tmp_path: Path, new_engine: NewEngine) -> None:
    engine = new_engine(replay=False)
    with RouterProcess(tmp_path) as router:
        before = fill(router, engine)
        router.kill()
        engine.publish(*removed(hashes(TOKENS)))
    engine.wait_subscribed(False)
    with RouterProcess(tmp_path) as router:
        assert ask(router) == {"w0": 192}
        router.wait_connected("w0", engine.wait_subscribed)
        row = router.wait_seen("w0", engine.publish(stored(OTHER, 2, 3)))
        assert row["epoch"] != before["epoch"] and row["gaps"] == 1
        assert ask(router) == {"w0": 0} and ask(router, OTHER) == {"w0": 0}


def test_an_engine_that_restarted_meanwhile_is_void_before_it_speaks(tmp_path: Path, new_engine: NewEngine) -> None:
    engine = new_engine()
    with RouterProcess(tmp_path) as router:
        before = fill(router, engine)
        router.kill()
        engine.restart()
        # Publish as many batches as the old life had, so that the lives differ in content alone.
        engine.publish(stored(OTHER, 0, 4))
        last = engine.publish(stored(OTHER, 4, 6))
    with RouterProcess(tmp_path) as router:
        router.wait_row("w0", lambda row: row["epoch"] != before["epoch"] and row["seq"] == last)
        assert ask(router) == {"w0": 0} and ask(router, OTHER) == {"w0": 96}


def test_a_new_life_at_the_old_seq_is_recognised_by_the_start_time_that_another_router_knew(
    tmp_path: Path, new_engine: NewEngine
) -> None:
    """Restart the engine without a replay endpoint, so that its next seq is the one that is waited for."""
    engine = new_engine(replay=False)
    http = EngineHttp()
    try:
        with RouterProcess(tmp_path) as router:
            engine.join(router, "w0", MODEL, url=http.url)
            deadline = time.monotonic() + WAIT_S
            with router.store() as store:
                # A batch carries the start time to Redis once the engine has answered.
                while not store.hget(keys.meta(WORKER), META_ENGINE_START):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                    router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 12)))
                before = router.wait_seen("w0", engine.publish(stored(OTHER, 0, 2)))
                assert ask(router) == {"w0": 192}
                wait_stored(store, {WORKER: before["seq"]})
            router.kill()
        engine.restart()
        http.start_s = 2_000.5
        for _ in range(before["seq"] + 1):
            engine.publish(stored(OTHER, 2, 3))
        with RouterProcess(tmp_path) as router:
            router.wait_connected("w0", engine.wait_subscribed)
            engine.publish(stored(OTHER, 3, 4))
            router.wait_row("w0", lambda row: row["epoch"] != before["epoch"] and row["state"] == "live")
            assert ask(router) == {"w0": 0}
    finally:
        http.stop()
