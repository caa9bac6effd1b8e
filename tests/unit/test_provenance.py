# SPDX-License-Identifier: Apache-2.0
"""Ranks, endpoints and publishers that contradict a registration, and set-ups of vLLM that do not."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.provenance import origin_problems, rank_problem, ranks_allowed
from kvrouter.router.model.workers.registration import NO_PATCH, Registration

A_URL, B_URL = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
A, B = "tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557"


def worker(name: str, rank: int = 0, *, url: str | None = A_URL, events: str | None = A, **given: Any) -> Registration:
    return Registration(WorkerKey("m", name, rank), url=url, events=events, **given)


@pytest.mark.parametrize(
    ("rank", "alone", "engine", "published", "allowed"),
    [
        # Internal load balancing has one address, with one core for each rank.
        (0, False, (0, 1), 0, True),
        (1, False, (0, 1), 1, True),
        (1, False, (0, 1), 0, False),
        (0, False, (0, 1), 1, False),
        (1, False, (), 0, False),
        (0, False, (), 1, False),
        (0, True, (0, 1), 1, False),
        # One core stands behind an address, with a rank among peers at other addresses (--data-parallel-rank 3).
        (0, True, (3,), 3, True),
        (3, True, (3,), 3, True),
        (0, True, (), 3, True),
        (0, True, (3,), 2, False),
        (0, True, (3,), 0, False),
        # The engine stands alone, but its registration counts it as rank 1.
        (1, True, (0,), 0, True),
        (1, True, (), 0, False),
        # Two ranks are registered at an engine that has one.
        (1, False, (0,), 0, False),
        # In hybrid load balancing (--data-parallel-start-rank 4), requests name ranks from 0, and events from 4.
        (0, False, (4, 5), 4, True),
        (1, False, (4, 5), 5, True),
        (1, False, (4, 5), 4, False),
        (4, False, (4, 5), 4, True),
        # A batch without a rank proves nothing.
        (1, False, (0, 1), None, True),
    ],
)
def test_a_worker_may_publish_only_the_ranks_allowed_to_it(
    rank: int, alone: bool, engine: tuple[int, ...], published: int | None, allowed: bool
) -> None:
    problem = rank_problem(published, rank, ranks_allowed(rank, alone, engine))
    assert (problem == "") is allowed
    if problem:
        assert f"publishes rank {published}" in problem and "port" in problem


def problems(*registrations: Registration, **given: object) -> dict[str, str]:
    problems_found = origin_problems(registrations, given.get("sources", {}), given.get("lives", {}))  # type: ignore[arg-type]
    return {worker.route_name: why for worker, why in problems_found.items()}


def test_two_workers_on_one_endpoint_are_both_named() -> None:
    named = problems(worker("w0"), worker("w1", url=B_URL), worker("w2", url=B_URL, events=B))
    assert set(named) == {"w0", "w1"}
    assert "w1" in named["w0"] and "w0" in named["w1"] and A in named["w0"]
    # Two ranks on one endpoint are named as well, and so are workers without an address, and two names of one host.
    assert set(problems(worker("w", 0), worker("w", 1))) == {"w", "w@1"}
    assert set(problems(worker("w0", url=None), worker("w1", url=None))) == {"w0", "w1"}
    local = "http://localhost:8000", "http://localhost:8001"
    same_host = (
        worker("w0", url=local[0], events="tcp://localhost:1"),
        worker("w1", url=local[1], events="tcp://127.0.0.1:1"),
    )
    assert set(problems(*same_host)) == {"w0", "w1"}


def test_a_named_endpoint_of_the_patch_is_one_engines_too() -> None:
    patched = [worker(name, url=f"{A_URL}/{name}", events=None, patch="tcp://10.0.0.1:15557") for name in ("w0", "w1")]
    assert set(problems(*patched)) == {"w0", "w1"}
    off = [worker(name, url=f"{A_URL}/{name}", events=None, patch=NO_PATCH) for name in ("w0", "w1")]
    assert not problems(*off)


def test_one_engine_registered_twice_is_no_contradiction() -> None:
    twice = Registration(WorkerKey("other", "w1"), url=A_URL + "/", events=A)
    assert not problems(worker("w0"), twice)


def test_swapped_endpoints_are_known_from_what_the_engines_say() -> None:
    sources = {A_URL: {0: Stream(A)}, B_URL: {0: Stream(B)}}
    swapped = worker("w0", events=B), worker("w1", url=B_URL, events=A)
    named = problems(*swapped, sources=sources)
    assert set(named) == {"w0", "w1"}
    assert A in named["w0"] and "w1" in named["w0"]
    assert not problems(worker("w0"), worker("w1", url=B_URL, events=B), sources=sources)
    # Neither engine said where its events are, so nothing is known.
    assert not problems(*swapped)


def test_a_mapped_port_is_no_contradiction() -> None:
    mapped = worker("w0", events="tcp://10.0.0.1:15557")
    assert not problems(mapped, sources={A_URL: {0: Stream(A)}})


def test_swapped_ranks_of_one_engine_are_known_too() -> None:
    second = "tcp://10.0.0.1:5558"
    sources = {A_URL: {0: Stream(A), 1: Stream(second)}}
    named = problems(worker("w", 0, events=second), worker("w", 1, events=A), sources=sources)
    assert set(named) == {"w", "w@1"}
    # In hybrid load balancing, the engine names ranks 4 and 5, and requests name 0 and 1.
    hybrid = {A_URL: {4: Stream(A), 5: Stream(second)}}
    assert not problems(worker("w", 0, events=A), worker("w", 1, events=second), sources=hybrid)
    assert not problems(worker("w", 4, events=A), worker("w", 5, events=second), sources=hybrid)
    # The only core fits, whatever its rank among its peers.
    assert not problems(worker("w", 0, events=A), sources={A_URL: {3: Stream(A)}})


def test_two_streams_of_one_publisher_are_one_engine() -> None:
    ours = worker("w0"), worker("w1", url=B_URL, events=B)
    lives = {ours[0].worker: "00112233aabbccdd", ours[1].worker: "00112233aabbccdd"}
    assert set(problems(*ours, lives=lives)) == {"w0", "w1"}
    assert not problems(*ours, lives={ours[0].worker: "1", ours[1].worker: "2"})
