# SPDX-License-Identifier: Apache-2.0
"""Shares of the routers: even, the same from every side, and steady."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.assignment import assign_workers

WORKERS = st.lists(
    st.builds(WorkerKey, st.sampled_from(["m", "\ud800"]), st.text(max_size=3), st.integers(0, 3)), max_size=40
)
ROUTERS = st.sets(st.text("abcdef0123456789", min_size=1, max_size=4), min_size=1, max_size=7)


@given(workers=WORKERS, routers=ROUTERS, seed=st.integers())
def test_an_assignment_is_even_complete_and_independent_of_order(
    workers: list[WorkerKey], routers: set[str], seed: int
) -> None:
    assignment = assign_workers(workers, routers, {})
    loads = Counter(assignment.values())
    counts = [loads[router] for router in routers]
    assert assignment.keys() == set(workers) and set(loads) <= routers
    assert max(counts) - min(counts) <= 1
    shuffled = list(workers)
    random.Random(seed).shuffle(shuffled)
    assert assign_workers(shuffled, sorted(routers, reverse=True), {}) == assignment


def test_a_router_that_stays_keeps_most_of_its_workers() -> None:
    workers = [WorkerKey("m", f"w{number}") for number in range(60)]
    routers = {f"router-{number}" for number in range(4)}
    before = assign_workers(workers, routers, {})
    after = assign_workers(workers, routers - {"router-2"}, {})
    stayed = [worker for worker in workers if before[worker] != "router-2"]
    assert sum(before[worker] == after[worker] for worker in stayed) > len(stayed) / 2


@given(workers=WORKERS, routers=ROUTERS, data=st.data())
def test_a_worker_goes_to_no_router_that_refuses_it(
    workers: list[WorkerKey], routers: set[str], data: st.DataObject
) -> None:
    refused = {worker: data.draw(st.sets(st.sampled_from(sorted(routers)))) for worker in workers}
    assignment = assign_workers(workers, routers, refused)
    assert assignment.keys() == {worker for worker in workers if refused[worker] != routers}
    assert all(router not in refused[worker] for worker, router in assignment.items())
    assert assign_workers(reversed(workers), sorted(routers, reverse=True), refused) == assignment


def test_a_router_that_refuses_one_worker_gets_others_in_its_place() -> None:
    workers = [WorkerKey("m", f"w{number}") for number in range(8)]
    assignment = assign_workers(workers, {"a", "b"}, {worker: {"a"} for worker in workers[:4]})
    assert Counter(assignment.values()) == {"a": 4, "b": 4}
    assert {assignment[worker] for worker in workers[:4]} == {"b"}
