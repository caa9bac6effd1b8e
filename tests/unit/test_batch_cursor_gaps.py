# SPDX-License-Identifier: Apache-2.0
"""Rules of the batch cursor for missing batches: gaps, checks of a silent stream, replays that do not answer."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.batch_cursor import Cursor, Finding
from kvrouter.events.vllm.replay_request import ANSWERS_BETWEEN_READINGS
from kvrouter.events.vllm.stream_items import (
    Connected,
    GapClosed,
    GapLost,
    GapOpened,
    Incomplete,
    Proven,
    ReplayFailed,
    Restarted,
    ResumePoint,
    RingReread,
)
from tests.support.batch_cursor_steps import again, asked, batch, following, joined, live, point, reconnect, replay


class TestGap:
    def test_a_gap_is_filled_by_the_replay(self) -> None:
        cursor = following(0, 1)
        assert live(cursor, 4, 5) == [GapOpened(2, 4), FellBehind()]
        assert asked(cursor) == 1
        assert replay(cursor, 1, 2, 3, 4) == [*again(2, 3), GapClosed(2, 4), *again(4), batch(5), CaughtUp()]
        assert live(cursor, 6) == [batch(6)]

    def test_a_gap_is_filled_up_to_the_held_batches(self) -> None:
        cursor = following(0)
        live(cursor, 2)
        assert replay(cursor, 0, 1) == [*again(1), GapClosed(1, 2), batch(2), CaughtUp()]

    def test_without_replay_a_gap_is_lost_at_once(self) -> None:
        cursor = Cursor(replay=False)
        live(cursor, 0)
        assert live(cursor, 3) == [GapLost(1, 3, ANY), batch(3)]

    def test_a_hole_in_the_answer_is_requested_again(self) -> None:
        cursor = following(0)
        live(cursor, 5)
        assert replay(cursor, 0, 1, 3, end=False) == again(1)
        assert asked(cursor) == 1
        assert replay(cursor, 1, 2, 3, 4, 5) == [*again(2, 3, 4), GapClosed(1, 5), *again(5), CaughtUp()]

    def test_a_hole_that_stays_is_lost(self) -> None:
        cursor = following(0)
        live(cursor, 5)
        replay(cursor, 0, 1, 3, end=False)
        assert replay(cursor, 1, 3, 4, 5) == [GapLost(2, 3, ANY), *again(3, 4, 5), CaughtUp()]

    def test_an_answer_that_ends_early_is_requested_again_once(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        assert replay(cursor, 0, 1) == again(1)
        assert asked(cursor) == 1
        assert replay(cursor, 1) == [GapLost(2, 3, ANY), batch(3), CaughtUp()]

    @pytest.mark.parametrize("first", [0, 2], ids=["from nothing", "after a resume"])
    def test_an_answer_that_is_cut_proves_nothing_of_what_follows(self, first: int) -> None:
        cursor = joined(resume=point(first) if first else None)
        replay(cursor, *range(first, 5), end=False)
        cursor.replay_overdue()
        assert cursor.take() == [], "it made progress, so the rest is requested"
        cursor.replay_overdue()
        assert cursor.take() == [ReplayFailed(ANY), GapLost(5, 5, ANY), Incomplete(), CaughtUp()]

    def test_an_answer_that_is_cut_before_held_batches_is_continued_by_them(self) -> None:
        cursor = joined()
        live(cursor, 3, 4)
        replay(cursor, 0, 1, 2, end=False)
        cursor.replay_overdue()
        cursor.replay_overdue()
        assert cursor.take()[-3:] == [batch(3), batch(4), CaughtUp()]

    def test_an_answer_that_is_cut_is_not_continued_by_what_was_held_before_the_connection(self) -> None:
        cursor = following(0, 1)
        reconnect(cursor)
        live(cursor, 2)
        reconnect(cursor)
        # It is the same engine, but it may have sent more than batch 2 while the cursor was disconnected.
        assert replay(cursor, 1, end=False)[-1] == Proven(1, "replay")
        cursor.replay_overdue()
        assert cursor.take() == [ReplayFailed(ANY), GapLost(2, ANY, ANY), Incomplete(), CaughtUp()]
        assert live(cursor, 5) == [batch(5)]

    def test_a_gap_without_an_answer_is_lost(self) -> None:
        cursor = following(0)
        live(cursor, 3, 4)
        cursor.replay_overdue()
        assert cursor.take() == [ReplayFailed(ANY), GapLost(1, 3, ANY), Incomplete(), batch(3), batch(4), CaughtUp()]

    def test_a_lost_gap_is_read_when_the_endpoint_answers_again(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        cursor.replay_overdue()
        assert cursor.take()[-2:] == [batch(3), CaughtUp()]
        cursor.check()
        assert asked(cursor) == 3
        assert replay(cursor, 3, end=False) == [FellBehind(), RingReread()]
        assert asked(cursor) == 0
        assert live(cursor, 4) == []
        assert replay(cursor, 0, 1, 2, 3, 4) == [*again(0, 1, 2, 3, 4), CaughtUp()]
        assert live(cursor, 5) == [batch(5)]

    def test_the_debt_outlives_connections_and_an_empty_start(self) -> None:
        cursor = joined()
        cursor.replay_overdue()
        live(cursor, 3)
        reconnect(cursor)
        cursor.take()
        assert replay(cursor, end=True) == [RingReread()]
        assert replay(cursor, 1, 2, 3) == [*again(1, 2, 3), CaughtUp()]

    def test_an_endpoint_that_never_sends_all_is_read_from_its_start_every_few_answers(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        cursor.replay_overdue()
        cursor.check()
        replay(cursor, 3, end=False)
        cursor.replay_overdue()
        live(cursor, 4)
        for _ in range(ANSWERS_BETWEEN_READINGS):
            assert cursor.degraded
            cursor.check()
            assert not any(isinstance(item, RingReread) for item in replay(cursor, 4))
        cursor.check()
        assert replay(cursor, 4, end=False) == [FellBehind(), RingReread()]
        assert replay(cursor, 0, 1, 2, 3, 4) == [*again(0, 1, 2, 3, 4), CaughtUp()]
        assert not cursor.degraded
        assert live(cursor, 5) == [batch(5)]

    def test_an_incomplete_resume_is_completed_when_the_endpoint_answers(self) -> None:
        cursor = joined(resume=ResumePoint(3, point(3).fingerprint, incomplete=True))
        assert replay(cursor, 3, end=False) == [FellBehind(), Connected(), RingReread()]

    def test_batches_that_left_the_ring_are_not_requested_again(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        replay(cursor, 0, 2)
        replay(cursor, 0, 2)
        cursor.check()
        assert not any(isinstance(item, RingReread) for item in replay(cursor, 3))

    def test_an_answer_that_stops_is_requested_again_from_there(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        replay(cursor, 0, 1, end=False)
        cursor.replay_overdue()
        assert asked(cursor) == 1
        assert replay(cursor, 1, 2) == [*again(2), GapClosed(1, 3), batch(3), CaughtUp()]

    def test_the_answer_of_another_life_fills_nothing(self) -> None:
        cursor = following(0, 1)
        live(cursor, 3, life="b")
        assert replay(cursor, 1, life="b", end=False) == [Restarted(1, 1, ANY)]
        assert asked(cursor) == 0
        assert replay(cursor, 0, 1, 2, 3, life="b") == [*again(0, 1, 2, 3, life="b"), CaughtUp()]

    def test_an_overflow_of_held_batches_is_a_gap(self) -> None:
        cursor = following(0, max_held=2)
        live(cursor, 2, 3, 4, 5)
        assert cursor.held == 2
        assert replay(cursor, 0, 1, 2) == [
            *again(1),
            GapClosed(1, 2),
            *again(2),
            GapOpened(3, 4),
        ], "behind all the while"
        assert asked(cursor) == 2
        assert replay(cursor, 2, 3)[-3:] == [batch(4), batch(5), CaughtUp()]

    def test_held_bytes_are_bounded_too(self) -> None:
        cursor = following(0, max_held_bytes=100)
        for seq in range(2, 50):
            cursor.live(seq, bytes(30))
        assert (cursor.held, cursor.held_bytes) == (3, 90)


class TestCheck:
    def test_a_check_that_finds_nothing_is_silent(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert asked(cursor) == 1
        assert live(cursor, 2) == [batch(2)]
        assert replay(cursor, 1, 2) == []

    def test_a_check_brings_the_missing_last_batches(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert replay(cursor, 1, 2, 3) == [FellBehind(), *again(2, 3), CaughtUp()]

    def test_a_check_detects_a_restart_behind_a_proxy(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert replay(cursor) == [FellBehind(), Restarted(1, 0, ANY)]

    def test_a_check_reports_what_the_live_socket_did_not_bring(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        replay(cursor, 1)
        assert cursor.take_finding() is None
        cursor.check()
        replay(cursor, 1, 2, end=False)
        assert cursor.take_finding() is None, "more may follow"
        replay(cursor, 3)
        assert cursor.take_finding() is Finding.BATCHES
        assert cursor.take_finding() is None
        cursor.check()
        replay(cursor, 7, 8)
        assert cursor.take_finding() is Finding.BATCHES, "the batches between are lost"
        cursor.check()
        replay(cursor)
        assert cursor.take_finding() is Finding.SUCCESSOR

    def test_batches_of_a_life_that_had_sent_nothing_are_reported(self) -> None:
        cursor = joined()
        replay(cursor)
        cursor.check()
        replay(cursor, 0, 1, life="b")
        assert cursor.take_finding() is Finding.BATCHES

    def test_an_answer_to_the_proof_of_a_connection_says_nothing_against_it(self) -> None:
        cursor = following(0, 1)
        reconnect(cursor)
        replay(cursor, 1, 2, 3)
        assert cursor.take_finding() is None
        reconnect(cursor)
        replay(cursor, 3, life="b")
        assert cursor.take_finding() is None
        replay(cursor, 0, 1, 2, 3, life="b")
        assert cursor.take_finding() is None

    def test_a_new_connection_has_no_findings(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        replay(cursor, life="b")
        reconnect(cursor)
        assert cursor.take_finding() is None

    def test_a_gap_replaces_a_check(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert live(cursor, 4) == [GapOpened(2, 4), FellBehind()]
        assert replay(cursor, 1, 2, 3)[:3] == [*again(2, 3), GapClosed(2, 4)]

    def test_a_dead_replay_endpoint_and_its_return_are_reported_once(self) -> None:
        cursor = following(0)
        cursor.check()
        cursor.replay_overdue()
        assert [type(item) for item in cursor.take()] == [ReplayFailed]
        cursor.check()
        cursor.replay_overdue()
        assert cursor.take() == []
        assert cursor.degraded
        cursor.check()
        assert replay(cursor, 0) == []
        assert not cursor.degraded

    def test_no_check_runs_while_disconnected_or_replaying(self) -> None:
        cursor = Cursor(replay=True)
        cursor.check()
        assert cursor.request is None
        cursor.connected()
        request = cursor.request
        cursor.check()
        assert cursor.request is request
