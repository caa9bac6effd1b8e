# SPDX-License-Identifier: Apache-2.0
"""Each router its share: even, the same from every side, and steady."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.names import WorkerKey
from kvrouter.router.shares import Attendance, shares

WORKERS = st.lists(
    st.builds(WorkerKey, st.sampled_from(["m", "\ud800"]), st.text(max_size=3), st.integers(0, 3)), max_size=40
)
ROUTERS = st.sets(st.text("abcdef0123456789", min_size=1, max_size=4), min_size=1, max_size=7)


@given(workers=WORKERS, routers=ROUTERS, seed=st.integers())
def test_even_complete_and_independent_of_order(workers: list[WorkerKey], routers: set[str], seed: int):
    found = shares(workers, routers)
    loads = Counter(found.values())
    counts = [loads[router] for router in routers]
    assert found.keys() == set(workers) and set(loads) <= routers
    assert max(counts) - min(counts) <= 1
    shuffled = list(workers)
    random.Random(seed).shuffle(shuffled)
    assert shares(shuffled, sorted(routers, reverse=True)) == found


def test_who_stays_keeps_most_of_its_workers():
    workers = [WorkerKey("m", f"w{number}") for number in range(60)]
    routers = {f"router-{number}" for number in range(4)}
    before = shares(workers, routers)
    after = shares(workers, routers - {"router-2"})
    stayed = [worker for worker in workers if before[worker] != "router-2"]
    assert sum(before[worker] == after[worker] for worker in stayed) > len(stayed) / 2


def test_a_router_is_gone_after_two_looks_and_there_at_once():
    attendance = Attendance("me")
    assert attendance.look(frozenset({"me", "you"}))
    assert not attendance.look(frozenset({"me"}))
    # Seen again in between: the pause was not its own.
    assert not attendance.look(frozenset({"me", "you"}))
    assert not attendance.look(frozenset({"me"}))
    assert attendance.look(frozenset({"me"}))
    assert attendance.routers == {"me"}
