# SPDX-License-Identifier: Apache-2.0
"""Order of log entries: each worker's entries stay in order, and no worker waits for another's backlog."""

from __future__ import annotations

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.mirror_sync import in_turns
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import FollowerItem, Reload, StoreBack


def entry(name: str, commit: int) -> LogEntry:
    return LogEntry(WorkerKey("m", name), f"{commit}-0", commit, "e", commit, commit, False, [], {})


def test_one_entry_of_each_worker_comes_in_turn() -> None:
    backlog: list[FollowerItem] = [entry("noisy", number) for number in range(50)]
    items = [*backlog, entry("quiet", 0), entry("quiet", 1), Reload(WorkerKey("m", "third"), "trimmed"), StoreBack(())]
    ordered = list(in_turns(items))
    assert sorted(map(repr, ordered)) == sorted(map(repr, items))
    assert [getattr(item, "worker", WorkerKey("", "store")).worker_id for item in ordered[:5]] == [
        *("noisy", "quiet", "third", "store"),
        "noisy",
    ]
    for name in ("noisy", "quiet"):
        commits = [item.commit for item in ordered if isinstance(item, LogEntry) and item.worker.worker_id == name]
        assert commits == sorted(commits)


def test_a_break_of_a_log_keeps_its_place() -> None:
    reload = Reload(WorkerKey("m", "a"), "trimmed")
    assert list(in_turns([entry("a", 1), reload])) == [entry("a", 1), reload]
