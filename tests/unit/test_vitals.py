# SPDX-License-Identifier: Apache-2.0
"""Signs of life in an engine's HTTP answers, and their judgement."""

from __future__ import annotations

from kvrouter.router.index.ingest.engine_liveness import (
    LOST_AFTER,
    EngineAbsent,
    EngineBack,
    EngineLiveness,
    EngineLost,
    EnginePresent,
    EngineRestarted,
    EngineSame,
    NoPulse,
    Pulse,
)
from kvrouter.router.model.workers.stream_state import StreamState, credited

SLOW = NoPulse("no answer in 2 s")
GONE = NoPulse("refused", gone=True)


def test_before_the_first_answer_silence_says_nothing() -> None:
    vitals = EngineLiveness()
    assert [vitals.observe(SLOW, 0.0) for _ in range(4)] == [[]] * 4
    assert vitals.observe(Pulse(5.0), 0.0) == []


def test_an_engine_that_is_not_up_is_absent_until_it_answers() -> None:
    vitals = EngineLiveness()
    assert [vitals.observe(sign, 0.0) for sign in (SLOW, GONE, GONE, SLOW)] == [[], [EngineAbsent("refused")], [], []]
    assert vitals.observe(Pulse(5.0), 0.0) == [EnginePresent()]
    assert vitals.observe(GONE, 0.0) == [EngineLost("refused")]


def test_a_refused_connection_is_a_loss_reported_once() -> None:
    vitals = EngineLiveness()
    vitals.observe(Pulse(), 0.0)
    assert vitals.observe(GONE, 1.0) == [EngineLost("refused")]
    assert vitals.observe(GONE, 2.0) == []
    assert vitals.observe(Pulse(), 3.0) == [EngineBack()]
    assert vitals.observe(GONE, 4.0) == [EngineLost("refused")]


def test_slow_answers_are_a_loss_only_in_a_row() -> None:
    vitals = EngineLiveness()
    for _ in range(3):
        assert vitals.observe(Pulse(), 0.0) == []
        for _ in range(LOST_AFTER - 1):
            assert vitals.observe(SLOW, 0.0) == []
    assert vitals.observe(SLOW, 0.0) == [EngineLost(f"no answer in 2 s {LOST_AFTER} times in a row")]


def test_a_new_start_time_is_another_process_and_an_equal_one_the_same() -> None:
    vitals = EngineLiveness()
    vitals.observe(Pulse(5.0), 0.0)
    # Not every answer has the start time.
    assert vitals.observe(Pulse(), 1.0) == []
    assert vitals.observe(Pulse(5.0), 2.0) == [EngineSame(2.0, 5.0)]
    (verdict,) = vitals.observe(Pulse(6.5), 3.0)
    assert isinstance(verdict, EngineRestarted) and "1.5 s after" in verdict.reason
    assert vitals.observe(Pulse(6.5), 4.0) == [EngineSame(4.0, 6.5)]


def test_an_engine_that_returns_with_another_start_is_another_process() -> None:
    vitals = EngineLiveness()
    vitals.observe(Pulse(5.0), 0.0)
    vitals.observe(GONE, 1.0)
    returned, restarted = vitals.observe(Pulse(9.0), 2.0)
    assert isinstance(returned, EngineBack) and isinstance(restarted, EngineRestarted)


def test_doubt_is_credited_for_a_while_and_missing_batches_never() -> None:
    assert credited(StreamState.LIVE, True) and credited(StreamState.CATCHING_UP, True)
    assert credited(StreamState.SUSPECT, False) and not credited(StreamState.SUSPECT, True)
    for state in (StreamState.CONNECTING, StreamState.RESYNCING, StreamState.UNHASHABLE, StreamState.DOWN):
        assert not credited(state, False)
