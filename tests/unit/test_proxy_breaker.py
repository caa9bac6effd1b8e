# SPDX-License-Identifier: Apache-2.0
"""The laws of a breaker, on a clock of our own."""

from __future__ import annotations

import pytest

from kvrouter.router.proxy.circuit_breaker import FAILURES_TO_OPEN, PAUSE_FIRST_S, PAUSE_LAST_S, Breaker, BreakerState


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.begun(now)
        breaker.failed("reset", now)
    return breaker


def test_the_breaker_opens_after_five_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed("reset", 0.0)
    assert breaker.problem(0.0) is None
    breaker.failed("reset by peer", 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert "5 failures in a row, the last: reset by peer" in str(breaker.problem(0.0))


def test_an_answer_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed("500", 0.0)
        breaker.answered()
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_failures_that_the_worker_did_not_cause_change_nothing() -> None:
    breaker = Breaker()
    for _ in range(10 * FAILURES_TO_OPEN):
        breaker.begun(0.0)
        breaker.unknown()
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_after_the_pause_one_request_tries() -> None:
    breaker = opened()
    just_before = PAUSE_FIRST_S - 0.001
    assert breaker.state(just_before) is BreakerState.OPEN
    assert breaker.problem(PAUSE_FIRST_S) is None
    breaker.begun(PAUSE_FIRST_S)
    assert "tried again with one request" in str(breaker.problem(PAUSE_FIRST_S))
    breaker.answered()
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.CLOSED


def test_a_try_whose_client_hung_up_leaves_it_to_the_next() -> None:
    breaker = opened()
    breaker.begun(PAUSE_FIRST_S)
    breaker.unknown()
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.HALF_OPEN
    assert breaker.problem(PAUSE_FIRST_S) is None


def test_each_failed_try_doubles_the_pause_up_to_the_last() -> None:
    breaker = opened()
    now, pauses = 0.0, []
    for _ in range(10):
        before = now
        while breaker.state(now) is BreakerState.OPEN:
            now += 0.25
        pauses.append(now - before)
        breaker.begun(now)
        breaker.failed("refused", now)
    assert pauses[0] == PAUSE_FIRST_S and pauses[1] == 2 * PAUSE_FIRST_S and pauses[-1] == PAUSE_LAST_S
    breaker.answered()
    breaker = opened()
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.HALF_OPEN


def test_failures_that_come_late_do_not_keep_it_open_longer() -> None:
    breaker = opened()
    for _ in range(100):
        breaker.failed("reset", PAUSE_FIRST_S / 2)
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.HALF_OPEN


def test_a_lost_engine_is_not_tried_before_it_is_found() -> None:
    breaker = Breaker()
    breaker.lost("no answer 3 times in a row", 5.0)
    assert breaker.state(1e9) is BreakerState.OPEN
    assert "health check: no answer 3 times" in str(breaker.problem(1e9))
    # Answers to requests that it had before do not make it healthy.
    breaker.answered()
    assert breaker.state(1e9) is BreakerState.OPEN
    breaker.found()
    assert breaker.state(1e9) is BreakerState.HALF_OPEN
    breaker.begun(1e9)
    breaker.answered()
    assert breaker.state(1e9) is BreakerState.CLOSED


@pytest.mark.parametrize("failures", [0, 1, FAILURES_TO_OPEN])
def test_found_without_lost_changes_no_state(failures: int) -> None:
    breaker = Breaker()
    for _ in range(failures):
        breaker.failed("500", 0.0)
    before = breaker.state(0.0)
    breaker.found()
    assert breaker.state(0.0) is before
