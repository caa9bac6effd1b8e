# SPDX-License-Identifier: Apache-2.0
"""Laws of a breaker, on a clock of the test."""

from __future__ import annotations

import pytest

from kvrouter.router.serve.proxy.circuit_breaker import (
    FAILURES_TO_OPEN,
    PAUSE_FIRST_S,
    PAUSE_LAST_S,
    TRIAL_S,
    Breaker,
    BreakerState,
)


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


def test_answers_that_break_off_open_it_however_well_they_begin() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.state(0.0) is BreakerState.CLOSED
        breaker.answered()
        breaker.spoiled("the connection ended", 0.0)
    assert "5 useless answers in a row, the last: the connection ended" in str(breaker.problem(0.0))


def test_a_whole_answer_between_broken_ones_keeps_it_closed_and_a_clients_error_does_not() -> None:
    for is_client_error, state in ((False, BreakerState.CLOSED), (True, BreakerState.OPEN)):
        breaker = Breaker()
        for _ in range(10):
            for _ in range(FAILURES_TO_OPEN - 1):
                breaker.answered()
                breaker.spoiled("cut", 0.0)
            breaker.answered()
            breaker.ended(is_client_error=is_client_error)
        assert breaker.state(0.0) is state


def test_the_end_of_an_older_stream_excuses_no_request_without_an_answer() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("refused", 0.0)
        breaker.ended()
    assert breaker.state(0.0) is BreakerState.OPEN
    breaker.ended()
    assert breaker.state(0.0) is BreakerState.OPEN
    assert breaker.begun(PAUSE_FIRST_S)
    breaker.ended()
    breaker.failed("reset", PAUSE_FIRST_S)
    breaker.unknown()
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.HALF_OPEN, "only the one that tries decides"
    assert "tried again" in str(breaker.problem(PAUSE_FIRST_S))


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
    assert breaker.begun(PAUSE_FIRST_S)
    assert "tried again with one request" in str(breaker.problem(PAUSE_FIRST_S))
    breaker.answered()
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.HALF_OPEN, "its first byte does not promise its end"
    breaker.ended(tried=True)
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.CLOSED


def test_a_try_that_breaks_off_opens_it_again() -> None:
    breaker = opened()
    assert breaker.begun(PAUSE_FIRST_S)
    breaker.answered()
    breaker.spoiled("cut", PAUSE_FIRST_S, tried=True)
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.OPEN
    assert "1 useless answer in a row" in str(breaker.problem(PAUSE_FIRST_S))


def test_a_long_try_lets_another_request_try() -> None:
    breaker = opened()
    assert breaker.begun(PAUSE_FIRST_S)
    breaker.answered()
    assert "tried again" in str(breaker.problem(PAUSE_FIRST_S + TRIAL_S - 0.001))
    assert breaker.problem(PAUSE_FIRST_S + TRIAL_S) is None


def test_a_try_whose_client_hung_up_leaves_it_to_the_next() -> None:
    breaker = opened()
    breaker.unknown(tried=breaker.begun(PAUSE_FIRST_S))
    assert breaker.state(PAUSE_FIRST_S) is BreakerState.HALF_OPEN
    assert breaker.problem(PAUSE_FIRST_S) is None


def test_each_failed_try_doubles_the_pause_up_to_the_last() -> None:
    breaker = opened()
    now, pauses = 0.0, []
    for _ in range(10):
        opened_s = now
        while breaker.state(now) is BreakerState.OPEN:
            now += 0.25
        pauses.append(now - opened_s)
        breaker.failed("refused", now, tried=breaker.begun(now))
    assert pauses[0] == PAUSE_FIRST_S and pauses[1] == 2 * PAUSE_FIRST_S and pauses[-1] == PAUSE_LAST_S
    now += PAUSE_LAST_S
    breaker.ended(tried=breaker.begun(now))
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("refused", now)
    assert breaker.state(now + PAUSE_FIRST_S) is BreakerState.HALF_OPEN, "the pauses begin again"


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
    # Answers to earlier requests do not make the engine healthy.
    breaker.answered()
    breaker.ended()
    assert breaker.state(1e9) is BreakerState.OPEN
    breaker.found()
    assert breaker.state(1e9) is BreakerState.HALF_OPEN
    breaker.ended(tried=breaker.begun(1e9))
    assert breaker.state(1e9) is BreakerState.CLOSED


@pytest.mark.parametrize("failures", [0, 1, FAILURES_TO_OPEN])
def test_found_without_lost_changes_no_state(failures: int) -> None:
    breaker = Breaker()
    for _ in range(failures):
        breaker.failed("500", 0.0)
    state_before = breaker.state(0.0)
    breaker.found()
    assert breaker.state(0.0) is state_before
