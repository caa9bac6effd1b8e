# SPDX-License-Identifier: Apache-2.0
"""The rules of order, one by one: what a Cursor says to what the wire brings."""

from __future__ import annotations

from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.replay_debt import ANSWERS_BETWEEN_READINGS
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
    ReadAnew,
    ReplayFailed,
    ReplayFinished,
    Restarted,
    ResumePoint,
    StreamItem,
    fingerprint,
)


def body(seq: int, life: str = "a") -> bytes:
    return f"{life}{seq}".encode()


def batch(seq: int, life: str = "a", *, replayed: bool = False) -> Batch:
    return Batch(seq, body(seq, life), fingerprint(body(seq, life)), replayed)


def again(*seqs: int, life: str = "a") -> list[Batch]:
    return [batch(seq, life, replayed=True) for seq in seqs]


def point(seq: int, life: str = "a") -> ResumePoint:
    return ResumePoint(seq, fingerprint(body(seq, life)))


def live(cursor: Cursor, *seqs: int, life: str = "a") -> list[StreamItem]:
    for seq in seqs:
        cursor.live(seq, body(seq, life))
    return cursor.take()


def replay(cursor: Cursor, *seqs: int, life: str = "a", end: bool = True) -> list[StreamItem]:
    for seq in seqs:
        cursor.replayed(seq, body(seq, life))
    if end:
        cursor.replay_ended()
    return cursor.take()


def asked(cursor: Cursor) -> int | None:
    return None if cursor.request is None else cursor.request.start


def following(*seqs: int, **options: object) -> Cursor:
    """A cursor with a replay endpoint that has handed `seqs` out."""
    cursor = Cursor(replay=True, **options)  # type: ignore[arg-type]
    cursor.connected()
    replay(cursor, *seqs)
    assert cursor.request is None
    return cursor


class TestStart:
    def test_without_replay_the_first_live_batch_is_the_start(self) -> None:
        cursor = Cursor(replay=False)
        cursor.connected()
        assert cursor.request is None
        assert live(cursor, 7, 8) == [Connected(), batch(7), batch(8)]

    def test_the_ring_comes_first_and_live_batches_wait(self) -> None:
        cursor = Cursor(replay=True)
        assert asked(cursor) is None
        cursor.connected()
        assert asked(cursor) == 0
        assert live(cursor, 4, 5) == [Connected(replaying=True)]
        assert cursor.held == 2
        assert replay(cursor, 2, 3, 4) == [*again(2, 3, 4), ReplayFinished(2, 4, 3), batch(5)]
        assert (cursor.held, cursor.held_bytes) == (0, 0)

    def test_a_ring_that_begins_late_is_no_gap(self) -> None:
        cursor = Cursor(replay=True)
        cursor.connected()
        assert replay(cursor, 90, 91)[1:] == [*again(90, 91), ReplayFinished(90, 91, 2)]

    def test_a_live_batch_before_the_news_of_the_connection_asks_too(self) -> None:
        cursor = Cursor(replay=True)
        assert live(cursor, 3) == []
        assert asked(cursor) == 0
        number = cursor.request.number if cursor.request else 0
        cursor.connected()
        assert cursor.request is not None
        assert cursor.request.number == number
        assert replay(cursor, 2, 3) == [Connected(replaying=True), *again(2, 3), ReplayFinished(2, 3, 2)]

    def test_an_empty_ring_makes_0_the_expected_seq(self) -> None:
        cursor = following()
        assert live(cursor, 1) == [GapOpened(0, 1)]
        assert replay(cursor, 0, 1) == [*again(0), GapClosed(0, 1), *again(1), ReplayFinished(0, 1, 2)]

    def test_no_answer_at_all(self) -> None:
        cursor = Cursor(replay=True)
        cursor.connected()
        live(cursor, 5)
        cursor.replay_overdue()
        items = cursor.take()
        assert isinstance(items[0], ReplayFailed)
        assert items[1:] == [Incomplete(), batch(5)]
        assert cursor.degraded
        assert live(cursor, 6) == [batch(6)]

    def test_a_held_batch_older_than_the_ring_does_not_restart_for_ever(self) -> None:
        cursor = Cursor(replay=True)
        cursor.connected()
        live(cursor, 0)
        replay(cursor, 3, 4)
        assert asked(cursor) == 0
        assert replay(cursor, 3, 4) == [*again(3, 4), ReplayFinished(3, 4, 2)]
        assert cursor.request is None


class TestResume:
    def test_proven_by_replay(self) -> None:
        cursor = Cursor(replay=True, resume=point(7))
        cursor.connected()
        assert asked(cursor) == 7
        items = replay(cursor, 7, 8, 9)
        assert items == [Connected(replaying=True), Proven(7, "replay"), *again(8, 9), ReplayFinished(8, 9, 2)]
        assert live(cursor, 10) == [batch(10)]

    def test_another_batch_under_the_same_seq_is_another_life(self) -> None:
        cursor = Cursor(replay=True, resume=point(7, "old"))
        cursor.connected()
        cursor.take()
        (restarted,) = replay(cursor, 7, end=False)
        assert isinstance(restarted, Restarted)
        assert (restarted.last_seq, restarted.seq) == (7, 7)
        assert asked(cursor) == 0
        assert replay(cursor, 0, 1) == [*again(0, 1), ReplayFinished(0, 1, 2)]

    def test_nothing_from_there_on_is_another_life(self) -> None:
        cursor = Cursor(replay=True, resume=point(7, "old"))
        cursor.connected()
        cursor.take()
        (restarted,) = replay(cursor)
        assert isinstance(restarted, Restarted)
        assert (restarted.last_seq, restarted.seq) == (7, 0)
        assert replay(cursor, 0) == [*again(0), ReplayFinished(0, 0, 1)]

    def test_a_ring_that_begins_later_is_lost(self) -> None:
        cursor = Cursor(replay=True, resume=point(7))
        cursor.connected()
        cursor.take()
        items = replay(cursor, 20, 21)
        assert isinstance(items[0], GapLost)
        assert (items[0].first_seq, items[0].next_seq) == (8, 20)
        assert items[1:] == [*again(20, 21), ReplayFinished(20, 21, 2)]

    def test_the_next_seq_without_the_known_one_proves_nothing(self) -> None:
        cursor = Cursor(replay=True, resume=point(7))
        cursor.connected()
        cursor.take()
        items = replay(cursor, 8)
        assert isinstance(items[0], GapLost)
        assert (items[0].first_seq, items[0].next_seq) == (8, 8)

    def test_without_answer_the_live_stream_decides(self) -> None:
        for seq, kind in ((8, GapLost), (9, GapLost), (7, Restarted), (0, Restarted)):
            cursor = Cursor(replay=True, resume=point(7, "old"))
            cursor.connected()
            live(cursor, seq)
            cursor.replay_overdue()
            items = cursor.take()
            assert [type(item) for item in items] == [ReplayFailed, kind, Incomplete, Batch]

    def test_what_is_held_from_the_connection_before_does_not_follow_an_unproven_replay(self) -> None:
        cursor = Cursor(replay=True, resume=point(1))
        cursor.connected()
        live(cursor, 3)
        cursor.disconnected()
        cursor.connected()
        items = replay(cursor, 2, life="b")
        assert [item for item in items if isinstance(item, Batch)] == again(2, life="b")

    def test_without_replay(self) -> None:
        def items(seq: int, life: str = "a") -> list[StreamItem]:
            return live(Cursor(replay=False, resume=point(7)), seq, life=life)

        assert items(8) == [Proven(7, "next_seq"), batch(8)]
        lost, late = items(10)
        assert isinstance(lost, GapLost)
        assert (lost.first_seq, lost.next_seq, late) == (8, 10, batch(10))
        restarted, first = items(7, "b")
        assert isinstance(restarted, Restarted)
        assert first == batch(7, "b")
        assert items(7) == []


class TestGap:
    def test_filled(self) -> None:
        cursor = following(0, 1)
        assert live(cursor, 4, 5) == [GapOpened(2, 4)]
        assert asked(cursor) == 1
        assert replay(cursor, 1, 2, 3, 4) == [
            *again(2, 3),
            GapClosed(2, 4),
            *again(4),
            ReplayFinished(2, 4, 3),
            batch(5),
        ]
        assert live(cursor, 6) == [batch(6)]

    def test_filled_up_to_what_is_held(self) -> None:
        cursor = following(0)
        live(cursor, 2)
        assert replay(cursor, 0, 1) == [*again(1), GapClosed(1, 2), ReplayFinished(1, 1, 1), batch(2)]

    def test_without_replay_it_is_lost_at_once(self) -> None:
        cursor = Cursor(replay=False)
        live(cursor, 0)
        lost, late = live(cursor, 3)
        assert isinstance(lost, GapLost)
        assert (lost.first_seq, lost.next_seq) == (1, 3)
        assert late == batch(3)

    def test_a_hole_in_the_answer_is_asked_again(self) -> None:
        cursor = following(0)
        live(cursor, 5)
        assert replay(cursor, 0, 1, 3, end=False) == again(1)
        assert asked(cursor) == 1
        assert replay(cursor, 1, 2, 3, 4, 5) == [
            *again(2, 3, 4),
            GapClosed(1, 5),
            *again(5),
            ReplayFinished(1, 5, 5),
        ]

    def test_a_hole_that_stays_is_lost(self) -> None:
        cursor = following(0)
        live(cursor, 5)
        replay(cursor, 0, 1, 3, end=False)
        items = replay(cursor, 1, 3, 4, 5)
        assert isinstance(items[0], GapLost)
        assert (items[0].first_seq, items[0].next_seq) == (2, 3)
        assert items[1:] == [*again(3, 4, 5), ReplayFinished(1, 5, 4)]

    def test_an_answer_that_ends_early_is_asked_again_once(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        assert replay(cursor, 0, 1) == again(1)
        assert asked(cursor) == 1
        items = replay(cursor, 1)
        assert isinstance(items[0], GapLost)
        assert (items[0].first_seq, items[0].next_seq) == (2, 3)
        assert items[1:] == [ReplayFinished(1, 1, 1), batch(3)]

    def test_no_answer_loses_it(self) -> None:
        cursor = following(0)
        live(cursor, 3, 4)
        cursor.replay_overdue()
        failed, lost, *rest = cursor.take()
        assert isinstance(failed, ReplayFailed)
        assert isinstance(lost, GapLost)
        assert (lost.first_seq, lost.next_seq) == (1, 3)
        assert rest == [Incomplete(), batch(3), batch(4)]

    def test_what_no_answer_lost_is_had_when_the_endpoint_answers_again(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        cursor.replay_overdue()
        assert cursor.take()[-1] == batch(3)
        cursor.check()
        assert asked(cursor) == 3
        assert replay(cursor, 3, end=False) == [ReadAnew()]
        assert asked(cursor) == 0
        assert live(cursor, 4) == []
        assert replay(cursor, 0, 1, 2, 3, 4) == [*again(0, 1, 2, 3, 4), ReplayFinished(0, 4, 5)]
        assert live(cursor, 5) == [batch(5)]

    def test_also_after_another_connection_and_when_nothing_was_known(self) -> None:
        cursor = Cursor(replay=True)
        cursor.connected()
        cursor.replay_overdue()
        live(cursor, 3)
        cursor.disconnected()
        cursor.connected()
        cursor.take()
        assert replay(cursor, end=True) == [ReadAnew()]
        assert replay(cursor, 1, 2, 3) == [*again(1, 2, 3), ReplayFinished(1, 3, 3)]

    def test_an_endpoint_that_never_gives_all_is_asked_for_it_again_after_some_answers(self) -> None:
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
            assert not any(isinstance(item, ReadAnew) for item in replay(cursor, 4))
        cursor.check()
        assert replay(cursor, 4, end=False) == [ReadAnew()]
        assert replay(cursor, 0, 1, 2, 3, 4) == [*again(0, 1, 2, 3, 4), ReplayFinished(0, 4, 5)]
        assert not cursor.degraded
        assert live(cursor, 5) == [batch(5)]

    def test_an_incomplete_resume_is_completed_when_the_endpoint_answers(self) -> None:
        cursor = Cursor(replay=True, resume=ResumePoint(3, point(3).fingerprint, incomplete=True))
        cursor.connected()
        assert replay(cursor, 3, end=False) == [Connected(replaying=True), ReadAnew()]

    def test_what_the_publisher_no_longer_has_is_not_asked_for_again(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        replay(cursor, 0, 2)
        replay(cursor, 0, 2)
        cursor.check()
        assert not any(isinstance(item, ReadAnew) for item in replay(cursor, 3))

    def test_an_answer_that_breaks_off_is_asked_again_from_where_it_was(self) -> None:
        cursor = following(0)
        live(cursor, 3)
        replay(cursor, 0, 1, end=False)
        cursor.replay_overdue()
        assert asked(cursor) == 1
        assert replay(cursor, 1, 2) == [*again(2), GapClosed(1, 3), ReplayFinished(1, 2, 2), batch(3)]

    def test_the_answer_of_another_life_fills_nothing(self) -> None:
        cursor = following(0, 1)
        live(cursor, 3, life="b")
        (restarted,) = replay(cursor, 1, life="b", end=False)
        assert isinstance(restarted, Restarted)
        assert asked(cursor) == 0
        assert replay(cursor, 0, 1, 2, 3, life="b") == [*again(0, 1, 2, 3, life="b"), ReplayFinished(0, 3, 4)]

    def test_too_many_held_are_a_gap_again(self) -> None:
        cursor = following(0, max_held=2)
        live(cursor, 2, 3, 4, 5)
        assert cursor.held == 2
        assert replay(cursor, 0, 1, 2) == [
            *again(1),
            GapClosed(1, 2),
            *again(2),
            ReplayFinished(1, 2, 2),
            GapOpened(3, 4),
        ]
        assert asked(cursor) == 2
        assert replay(cursor, 2, 3)[-2:] == [batch(4), batch(5)]

    def test_held_bytes_are_bounded_too(self) -> None:
        cursor = following(0, max_held_bytes=100)
        for seq in range(2, 50):
            cursor.live(seq, bytes(30))
        assert (cursor.held, cursor.held_bytes) == (3, 90)


class TestRestart:
    def test_seq_falls_back(self) -> None:
        cursor = following(0, 1, 2)
        (restarted,) = live(cursor, 0, life="b")
        assert isinstance(restarted, Restarted)
        assert (restarted.last_seq, restarted.seq) == (2, 0)
        assert asked(cursor) == 0
        assert live(cursor, 1, life="b") == []
        assert replay(cursor, 0, 1, life="b") == [*again(0, 1, life="b"), ReplayFinished(0, 1, 2)]

    def test_without_replay_the_new_life_goes_on_from_there(self) -> None:
        cursor = Cursor(replay=False)
        live(cursor, 5)
        restarted, first = live(cursor, 2, life="b")
        assert isinstance(restarted, Restarted)
        assert first == batch(2, "b")
        assert live(cursor, 3, life="b") == [batch(3, "b")]

    def test_a_duplicate_is_no_restart(self) -> None:
        cursor = following(0, 1, 2)
        assert live(cursor, 1, 2, 0, 3) == [batch(3)]

    def test_a_duplicate_older_than_memory_is_taken_for_one(self) -> None:
        cursor = Cursor(replay=False)
        live(cursor, *range(REMEMBERED_BATCHES + 1))
        assert live(cursor, 1) == []
        assert isinstance(live(cursor, 0)[0], Restarted)


class TestConnection:
    def test_a_reconnect_is_proven(self) -> None:
        cursor = following(0, 1)
        cursor.disconnected()
        cursor.connected()
        assert asked(cursor) == 1
        assert live(cursor, 3) == [Disconnected(), Connected(replaying=True)]
        assert replay(cursor, 1, 2) == [Proven(1, "replay"), *again(2), ReplayFinished(2, 2, 1), batch(3)]

    def test_an_idle_publisher_of_another_life_is_found_out(self) -> None:
        cursor = following(0, 1)
        cursor.disconnected()
        cursor.connected()
        cursor.take()
        assert isinstance(replay(cursor)[0], Restarted)
        assert replay(cursor, 0, life="b") == [*again(0, life="b"), ReplayFinished(0, 0, 1)]

    def test_without_replay_the_next_seq_is_the_proof(self) -> None:
        cursor = Cursor(replay=False)
        cursor.connected()
        live(cursor, 4)
        cursor.disconnected()
        cursor.connected()
        assert live(cursor, 5, 6)[2:] == [Proven(4, "next_seq"), batch(5), batch(6)]

    def test_held_batches_of_the_lost_connection_never_join_the_new_life(self) -> None:
        cursor = following(0, 1)
        live(cursor, 3, 4)
        cursor.disconnected()
        cursor.connected()
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
        assert replay(cursor, 0, 1, 2, 3) == [
            Proven(0, "replay"),
            *again(1, 2),
            GapClosed(1, 3),
            *again(3),
            ReplayFinished(1, 3, 3),
        ]

    def test_only_a_connection_can_be_lost(self) -> None:
        cursor = Cursor(replay=True)
        cursor.disconnected()
        assert cursor.take() == []


class TestCheck:
    def test_nothing_missed_is_not_news(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert asked(cursor) == 1
        assert live(cursor, 2) == [batch(2)]
        assert replay(cursor, 1, 2) == []

    def test_a_missing_tail_is_brought(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert replay(cursor, 1, 2, 3) == [*again(2, 3), ReplayFinished(2, 3, 2)]

    def test_a_restart_behind_a_proxy_is_found_out(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert isinstance(replay(cursor)[0], Restarted)

    def test_a_gap_in_the_meantime_takes_over(self) -> None:
        cursor = following(0, 1)
        cursor.check()
        assert live(cursor, 4) == [GapOpened(2, 4)]
        assert replay(cursor, 1, 2, 3)[:3] == [*again(2, 3), GapClosed(2, 4)]

    def test_a_dead_replay_is_told_once_and_so_is_its_return(self) -> None:
        cursor = following(0)
        cursor.check()
        cursor.replay_overdue()
        assert [type(item) for item in cursor.take()] == [ReplayFailed]
        cursor.check()
        cursor.replay_overdue()
        assert cursor.take() == []
        assert cursor.degraded
        cursor.check()
        assert replay(cursor, 0) == [ReplayFinished(None, None, 0)]
        assert not cursor.degraded

    def test_none_while_disconnected_or_asking(self) -> None:
        cursor = Cursor(replay=True)
        cursor.check()
        assert cursor.request is None
        cursor.connected()
        request = cursor.request
        cursor.check()
        assert cursor.request is request


def test_every_request_has_its_own_number() -> None:
    cursor = following(0)
    live(cursor, 3)
    first = cursor.request
    replay(cursor, 0, 2, end=False)
    assert first is not None
    assert cursor.request is not None
    assert cursor.request.number != first.number


def test_malformed_is_passed_on() -> None:
    cursor = Cursor(replay=False)
    cursor.malformed("two frames")
    assert cursor.take() == [Malformed("two frames")]


def test_answers_without_a_request_are_ignored() -> None:
    cursor = following(0)
    assert replay(cursor, 0, 1, 2) == []


def test_a_batch_of_the_old_life_that_comes_late_does_not_continue_the_new_one() -> None:
    cursor = Cursor(replay=True, resume=ResumePoint(6, fingerprint(b"old 6")))
    cursor.connected()
    cursor.replayed(6, b"old 6")
    cursor.replay_ended()
    cursor.disconnected()
    # The monitor's news came first: this was sent before the restart.
    cursor.live(7, b"old 7")
    for seq in range(6, 7):
        cursor.replayed(seq, b"new %d" % seq)
    for seq in range(7):
        cursor.replayed(seq, b"new %d" % seq)
    cursor.replay_ended()
    handed = [item.payload for item in cursor.take() if isinstance(item, Batch)]
    assert handed == [b"new %d" % seq for seq in range(7)]
