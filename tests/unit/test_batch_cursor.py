# SPDX-License-Identifier: Apache-2.0
"""Rules of the batch cursor, one by one: where a stream starts, resumes, restarts and reconnects."""

from __future__ import annotations

from unittest.mock import ANY

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.seen_batches import REMEMBERED_BATCHES
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapClosed,
    GapLost,
    GapOpened,
    Incomplete,
    Malformed,
    Proven,
    ReplayFailed,
    Restarted,
    ResumePoint,
    StreamItem,
    fingerprint,
)
from tests.support.batch_cursor_steps import again, asked, batch, following, joined, live, point, reconnect, replay


class TestStart:
    def test_without_replay_the_first_live_batch_is_the_start(self) -> None:
        cursor = Cursor(replay=False)
        cursor.connected()
        assert cursor.request is None
        assert live(cursor, 7, 8) == [Connected(), batch(7), batch(8)]

    def test_live_batches_wait_for_the_ring(self) -> None:
        cursor = Cursor(replay=True)
        assert asked(cursor) is None
        cursor.connected()
        assert asked(cursor) == 0
        assert live(cursor, 4, 5) == [FellBehind(), Connected()]
        assert cursor.held == 2
        assert replay(cursor, 2, 3, 4) == [*again(2, 3, 4), batch(5), CaughtUp()]
        assert (cursor.held, cursor.held_bytes) == (0, 0)

    def test_a_ring_that_begins_late_is_no_gap(self) -> None:
        cursor = joined()
        assert replay(cursor, 90, 91)[2:] == [*again(90, 91), CaughtUp()]

    def test_a_live_batch_before_its_connection_requests_a_replay(self) -> None:
        cursor = Cursor(replay=True)
        assert live(cursor, 3) == [FellBehind()]
        assert asked(cursor) == 0
        request = cursor.request
        cursor.connected()
        assert cursor.request is request
        assert replay(cursor, 2, 3) == [Connected(), *again(2, 3), CaughtUp()]

    def test_nothing_is_caught_up_while_the_live_socket_was_not_read(self) -> None:
        cursor = joined()
        cursor.set_unread(True)
        assert CaughtUp() not in replay(cursor, 0, 1)
        assert live(cursor, 2) == [batch(2)]
        cursor.set_unread(False)
        assert cursor.take() == [CaughtUp()]

    def test_an_empty_ring_makes_0_the_expected_seq(self) -> None:
        cursor = following()
        assert live(cursor, 1) == [GapOpened(0, 1), FellBehind()]
        assert replay(cursor, 0, 1) == [*again(0), GapClosed(0, 1), *again(1), CaughtUp()]

    def test_without_any_answer_the_live_stream_continues(self) -> None:
        cursor = joined()
        live(cursor, 5)
        cursor.replay_overdue()
        assert cursor.take() == [ReplayFailed(ANY), Incomplete(), batch(5), CaughtUp()]
        assert cursor.degraded
        assert live(cursor, 6) == [batch(6)]

    def test_a_held_batch_older_than_the_ring_restarts_once(self) -> None:
        cursor = joined()
        live(cursor, 0)
        replay(cursor, 3, 4)
        assert asked(cursor) == 0
        assert replay(cursor, 3, 4) == [*again(3, 4), CaughtUp()]
        assert cursor.request is None


class TestResume:
    def test_a_replay_from_the_kept_batch_proves_the_life(self) -> None:
        cursor = joined(resume=point(7))
        assert asked(cursor) == 7
        assert replay(cursor, 7, 8, 9) == [FellBehind(), Connected(), Proven(7, "replay"), *again(8, 9), CaughtUp()]
        assert live(cursor, 10) == [batch(10)]

    def test_another_batch_under_the_same_seq_is_another_life(self) -> None:
        cursor = joined(resume=point(7, "old"))
        cursor.take()
        assert replay(cursor, 7, end=False) == [Restarted(7, 7, ANY)]
        assert asked(cursor) == 0
        assert replay(cursor, 0, 1) == [*again(0, 1), CaughtUp()]

    def test_an_empty_replay_means_another_life(self) -> None:
        cursor = joined(resume=point(7, "old"))
        cursor.take()
        assert replay(cursor) == [Restarted(7, 0, ANY)]
        assert replay(cursor, 0) == [*again(0), CaughtUp()]

    def test_a_ring_that_begins_after_the_resume_is_a_lost_gap(self) -> None:
        cursor = joined(resume=point(7))
        cursor.take()
        assert replay(cursor, 20, 21) == [GapLost(8, 20, ANY), *again(20, 21), CaughtUp()]

    def test_the_next_seq_alone_proves_nothing(self) -> None:
        cursor = joined(resume=point(7))
        cursor.take()
        assert replay(cursor, 8)[0] == GapLost(8, 8, ANY)

    def test_without_an_answer_the_live_stream_decides(self) -> None:
        for seq, kind in ((8, GapLost), (9, GapLost), (7, Restarted), (0, Restarted)):
            cursor = joined(resume=point(7, "old"))
            live(cursor, seq)
            cursor.replay_overdue()
            items = cursor.take()
            assert [type(item) for item in items] == [ReplayFailed, kind, Incomplete, Batch, CaughtUp]

    def test_batches_held_from_an_old_connection_do_not_follow_an_unproven_replay(self) -> None:
        cursor = joined(resume=point(1))
        live(cursor, 3)
        reconnect(cursor)
        items = replay(cursor, 2, life="b")
        assert [item for item in items if isinstance(item, Batch)] == again(2, life="b")

    def test_without_replay_the_next_seq_proves_the_resume(self) -> None:
        def items(seq: int, life: str = "a") -> list[StreamItem]:
            return live(Cursor(replay=False, resume=point(7)), seq, life=life)

        assert items(8) == [Proven(7, "next_seq"), batch(8)]
        assert items(10) == [GapLost(8, 10, ANY), batch(10)]
        assert items(7, "b") == [Restarted(7, 7, ANY), batch(7, "b")]
        assert items(7) == []


class TestRestart:
    def test_a_lower_seq_is_a_restart(self) -> None:
        cursor = following(0, 1, 2)
        assert live(cursor, 0, life="b") == [FellBehind(), Restarted(2, 0, ANY)]
        assert asked(cursor) == 0
        assert live(cursor, 1, life="b") == []
        assert replay(cursor, 0, 1, life="b") == [*again(0, 1, life="b"), CaughtUp()]

    def test_without_replay_the_new_life_starts_at_its_first_batch(self) -> None:
        cursor = Cursor(replay=False)
        live(cursor, 5)
        assert live(cursor, 2, life="b") == [Restarted(5, 2, ANY), batch(2, "b")]
        assert live(cursor, 3, life="b") == [batch(3, "b")]

    def test_a_duplicate_is_no_restart(self) -> None:
        assert live(following(0, 1, 2), 1, 2, 0, 3) == [batch(3)]

    def test_a_duplicate_older_than_memory_is_a_restart(self) -> None:
        cursor = Cursor(replay=False)
        live(cursor, *range(REMEMBERED_BATCHES + 1))
        assert live(cursor, 1) == []
        assert isinstance(live(cursor, 0)[0], Restarted)


class TestConnection:
    def test_a_reconnect_is_proven(self) -> None:
        cursor = following(0, 1)
        reconnect(cursor)
        assert asked(cursor) == 1
        assert live(cursor, 3) == [Disconnected(), FellBehind(), Connected()]
        assert replay(cursor, 1, 2) == [Proven(1, "replay"), *again(2), batch(3), CaughtUp()]

    def test_an_idle_publisher_of_another_life_is_detected(self) -> None:
        cursor = following(0, 1)
        reconnect(cursor)
        cursor.take()
        assert isinstance(replay(cursor)[0], Restarted)
        assert replay(cursor, 0, life="b") == [*again(0, life="b"), CaughtUp()]

    def test_without_replay_the_next_seq_is_the_proof(self) -> None:
        cursor = Cursor(replay=False)
        cursor.connected()
        live(cursor, 4)
        reconnect(cursor)
        assert live(cursor, 5, 6)[2:] == [Proven(4, "next_seq"), batch(5), batch(6)]

    def test_held_batches_of_the_lost_connection_never_join_the_new_life(self) -> None:
        cursor = following(0, 1)
        live(cursor, 3, 4)
        reconnect(cursor)
        cursor.take()
        assert isinstance(replay(cursor)[0], Restarted)
        assert cursor.held == 0
        assert replay(cursor, 0, 1, 2, life="b")[:-1] == again(0, 1, 2, life="b")
        assert live(cursor, 3, life="b") == [batch(3, "b")]

    def test_a_gap_outlives_the_connection(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        cursor.disconnected()
        assert cursor.request is None
        cursor.connected()
        cursor.take()
        assert replay(cursor, 0, 1, 2, 3) == [Proven(0, "replay"), *again(1, 2), GapClosed(1, 3), *again(3), CaughtUp()]

    def test_only_a_connection_can_be_lost(self) -> None:
        cursor = Cursor(replay=True)
        cursor.disconnected()
        assert cursor.take() == []


def test_every_request_has_its_own_number() -> None:
    cursor = following(0)
    live(cursor, 3)
    first = cursor.request
    replay(cursor, 0, 2, end=False)
    assert first and cursor.request and cursor.request.number != first.number


def test_malformed_messages_are_reported() -> None:
    cursor = Cursor(replay=False)
    cursor.malformed("two frames")
    assert cursor.take() == [Malformed("two frames")]


def test_answers_without_a_request_are_ignored() -> None:
    assert replay(following(0), 0, 1, 2) == []


def test_a_late_batch_of_the_old_life_does_not_continue_the_new_one() -> None:
    cursor = joined(resume=ResumePoint(6, fingerprint(b"old 6")))
    cursor.replayed(6, b"old 6")
    cursor.replay_ended()
    cursor.disconnected()
    # The monitor reported the disconnection first, but the engine sent this batch before its restart.
    cursor.live(7, b"old 7")
    for seq in (6, *range(7)):
        cursor.replayed(seq, b"new %d" % seq)
    cursor.replay_ended()
    handed = [item.payload for item in cursor.take() if isinstance(item, Batch)]
    assert handed == [b"new %d" % seq for seq in range(7)]
