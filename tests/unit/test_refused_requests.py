# SPDX-License-Identifier: Apache-2.0
"""The moment from which a worker counts as one that refuses more than its peers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from random import Random

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.serve.proxy.refused_requests import (
    COUNTED_MIN,
    WINDOW,
    WINDOW_S,
    AnswerCount,
    Difference,
    RefusedRequests,
    differs,
)

ODD, *PEERS = (WorkerKey("m", name) for name in ("w0", "w1", "w2"))


class Clock:
    """A clock that a test sets."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def answer(
    requests: RefusedRequests,
    worker: WorkerKey,
    *,
    refused: int = 0,
    answered: int = 0,
    callers: Sequence[int] = (1, 2),
) -> None:
    caller = cycle(callers)
    for status, count in ((400, refused), (200, answered)):
        for _ in range(count):
            requests.add(worker, status, lambda: next(caller))


@pytest.mark.parametrize(
    ("own", "peers", "expected"),
    [
        ((12, 40), (0, 40), True),
        ((128, 128), (0, 32), True),
        # Too few of either side.
        ((31, 31), (0, 128), False),
        ((40, 40), (0, 31), False),
        # A tenth is not reached, or the peers refuse a third of that share.
        ((12, 128), (0, 1_000), False),
        ((60, 128), (16, 128), False),
        # It may be chance.
        ((5, 40), (0, 40), False),
        # All requests are wrong.
        ((128, 128), (128, 128), False),
    ],
)
def test_a_worker_differs_by_share_ratio_and_beyond_chance(
    own: tuple[int, int], peers: tuple[int, int], expected: bool
) -> None:
    assert differs(AnswerCount(own[1], own[0]), AnswerCount(peers[1], peers[0])) is expected


def test_the_worker_and_its_usual_status_are_named() -> None:
    requests = RefusedRequests(Clock())
    answer(requests, ODD, refused=20, answered=20)
    requests.add(ODD, 404, lambda: 3)
    assert not requests.problems(), "it has no peers"
    # Workers of another model are no peers.
    answer(requests, WorkerKey("other", "w9"), answered=WINDOW)
    assert not requests.problems()
    for peer in PEERS:
        answer(requests, peer, answered=COUNTED_MIN // 2)
    text = "it refused 21 of its last 41 requests (mostly with 400), and its peers 0 of 32"
    assert requests.problems() == {ODD: Difference(text, is_spread=True)}


@pytest.mark.parametrize(
    ("callers", "doubt"),
    [
        ([1, 2], ""),
        ([1, 2, 3, 4], ""),
        ([1], "up to 40 of them came from one client"),
        ([1, 1, 1, 2], "up to 30 of them came from one client"),
        ([0], "whether they came from one client cannot be seen"),
        # Refusals of unknown clients may all be of the client that has most of the others.
        ([1, 2, 3, 0], ""),
        ([1, 2, 1, 0], "up to 30 of them came from one client"),
        ([0, 0, 0, 1], "whether they came from one client cannot be seen"),
    ],
)
def test_refusals_of_one_client_do_not_blame_the_worker_alone(callers: list[int], doubt: str) -> None:
    requests = RefusedRequests(Clock())
    # Requests that were answered say nothing about the clients of the refused ones.
    answer(requests, ODD, refused=40, callers=callers)
    answer(requests, ODD, answered=40, callers=[7, 8, 9])
    answer(requests, PEERS[0], answered=WINDOW)
    difference = requests.problems()[ODD]
    assert difference.is_spread is not bool(doubt)
    assert doubt in difference.evidence and ("client" in difference.evidence) is bool(doubt)


def test_the_client_of_an_answer_is_only_looked_up_if_it_is_refused() -> None:
    def caller() -> int:
        raise AssertionError("a number for the client costs time")

    requests = RefusedRequests(Clock())
    for status in (200, 302, 500):
        requests.add(ODD, status, caller)


def test_answers_leave_with_the_window_with_time_and_with_the_engines_life() -> None:
    clock = Clock()
    requests = RefusedRequests(clock)
    for forget in (
        lambda: answer(requests, ODD, answered=WINDOW),
        lambda: setattr(clock, "now_s", clock.now_s + WINDOW_S + 1),
        lambda: requests.forget(ODD),
    ):
        answer(requests, ODD, refused=WINDOW)
        answer(requests, PEERS[0], answered=WINDOW)
        assert list(requests.problems()) == [ODD]
        forget()
        assert not requests.problems()


def test_errors_of_the_engine_are_no_refusals() -> None:
    requests = RefusedRequests(Clock())
    for _ in range(WINDOW):
        requests.add(ODD, 500, lambda: 1)
    answer(requests, PEERS[0], answered=WINDOW)
    assert not requests.problems()


def test_workers_that_refuse_alike_are_never_named() -> None:
    rng = Random(1)
    requests = RefusedRequests(Clock())
    for _ in range(20_000):
        requests.add(rng.choice((ODD, *PEERS)), 400 if rng.random() < 0.1 else 200, lambda: 1)
        assert not requests.problems()
