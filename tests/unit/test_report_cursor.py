# SPDX-License-Identifier: Apache-2.0
"""Each rule of the report cursor by itself; what they amount to together is test_report_cursor_model.py's subject."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from fake_reporter import Ledger, packed, parts, stored, summary

from kvrouter.events.patch.cursor import REMEMBERED_EPOCHS, ReportCursor
from kvrouter.events.patch.items import (
    Declared,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    ReportItem,
    ReportResume,
    SnapshotFailed,
)
from kvrouter.events.patch.messages import (
    CatalogMessage,
    DeclaredCatalog,
    Events,
    Heartbeat,
    Hello,
    PlaceSummary,
    SnapshotPart,
)
from kvrouter.events.patch.snapshot_assembly import MAX_NAME_CHARS, MAX_PLACES, SnapshotAssembly, SnapshotError
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Malformed

A, B, C = "a" * 16, "b" * 16, "c" * 16
CATALOG = DeclaredCatalog([])
MAX_SEQ = 2**63 - 1


def hello(epoch: str = A, next_seq: int = 0, **fields: Any) -> Hello:
    return Hello(1, epoch, 1.0, next_seq, "tcp://127.0.0.1:1", 1.0, **fields)


def events(epoch: str = A, dropped: int = 0) -> Events:
    return Events(epoch, 1.0, 2.0, [stored(1)], dropped=dropped)


def beat(epoch: str = A, catalog_version: int = 0) -> Heartbeat:
    return Heartbeat(epoch, 1.0, 2.0, 1.0, [], catalog_version)


def snapshot(cursor: ReportCursor, next_seq: int, epoch: str = A) -> list[SnapshotPart]:
    assert cursor.request is not None
    return parts({(0, "GPU"): Counter((5, 6, 6, 7))}, cursor.request, epoch, next_seq)


def load(cursor: ReportCursor, next_seq: int, epoch: str = A) -> None:
    for part in snapshot(cursor, next_seq, epoch):
        cursor.part(part)


def kinds(items: list[ReportItem]) -> list[str]:
    return [type(item).__name__ for item in items]


def seqs(items: list[ReportItem]) -> list[int]:
    return [item.seq for item in items if isinstance(item, ReportBatch)]


def live(cursor: ReportCursor, *seqs: int, epoch: str = A) -> None:
    for seq in seqs:
        cursor.events(seq, events(epoch), 10)


def greeted(**options: Any) -> ReportCursor:
    cursor = ReportCursor(**options)
    cursor.hello(hello())
    cursor.take()
    return cursor


def in_order(next_seq: int = 10, **options: Any) -> ReportCursor:
    cursor = greeted(**options)
    cursor.asked()
    load(cursor, next_seq)
    assert kinds(cursor.take()) == ["Loaded"]
    return cursor


class TestStart:
    def test_first_answer_greets_and_declares(self) -> None:
        cursor = ReportCursor()
        assert cursor.greeting_wanted
        answer = hello(catalog_version=3, catalog=CATALOG)
        cursor.hello(answer)
        assert cursor.take() == [Greeted(answer), Declared(3, CATALOG)]
        assert not cursor.greeting_wanted
        assert cursor.request is not None

    def test_snapshot_then_batches(self) -> None:
        cursor = greeted()
        cursor.asked()
        live(cursor, 8, 9, 10, 11)
        assert cursor.take() == []
        assert (cursor.held, cursor.held_bytes) == (4, 40)
        load(cursor, 10)
        items = cursor.take()
        assert kinds(items) == ["Loaded", "ReportBatch", "ReportBatch"]
        assert seqs(items) == [10, 11]
        assert cursor.request is None
        assert cursor.held == cursor.held_bytes == 0
        live(cursor, 12)
        assert seqs(cursor.take()) == [12]

    def test_what_came_before_asking_is_in_the_snapshot(self) -> None:
        cursor = greeted()
        live(cursor, 5, MAX_SEQ)
        assert cursor.held == 0
        cursor.asked()
        load(cursor, 6)
        assert kinds(cursor.take()) == ["Loaded"]

    def test_loaded_says_what_is_resident(self) -> None:
        cursor = greeted()
        cursor.asked()
        load(cursor, 10)
        (item,) = cursor.take()
        assert isinstance(item, Loaded)
        loaded = item.snapshot
        assert (loaded.epoch, loaded.started_s, loaded.next_seq) == (A, 1.0, 10)
        (place,) = loaded.places
        assert (place.group_idx, place.medium, place.ownership, place.copied) == (0, "GPU", None, [(6, 2)])
        assert place.hashes.tolist() == [5, 6, 7]
        assert loaded.summary == [PlaceSummary(0, "GPU", 3, 4, 18)]
        assert loaded.size_bytes == 24

    def test_empty_ledger_loads(self) -> None:
        cursor = greeted()
        cursor.asked()
        assert cursor.request is not None
        for part in parts({}, cursor.request, A, 0):
            cursor.part(part)
        (item,) = cursor.take()
        assert isinstance(item, Loaded)
        assert item.snapshot.places == []

    def test_subscribed_too_late_for_the_snapshot_asks_again(self) -> None:
        cursor = greeted()
        cursor.asked()
        first = cursor.request
        live(cursor, 12)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["SnapshotFailed"]
        assert cursor.request not in (None, first)
        cursor.asked()
        load(cursor, 13)
        assert kinds(cursor.take()) == ["Loaded"]

    def test_held_heartbeat_shows_a_lost_tail(self) -> None:
        cursor = greeted()
        cursor.asked()
        cursor.heartbeat(12, beat(), 10)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["SnapshotFailed"]

    def test_held_heartbeat_in_order_is_handed_out(self) -> None:
        cursor = greeted()
        cursor.asked()
        cursor.heartbeat(9, beat(), 10)
        live(cursor, 10)
        cursor.heartbeat(11, beat(), 10)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch", "HeartbeatSeen"]

    def test_gap_among_the_held(self) -> None:
        cursor = greeted()
        cursor.asked()
        live(cursor, 10, 13)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch", "ReportGap"]
        assert cursor.request is not None
        cursor.asked()
        live(cursor, 14)
        load(cursor, 14)
        assert seqs(cursor.take()) == [14]


class TestResume:
    def resumed(self, next_seq: int = 10) -> ReportCursor:
        return ReportCursor(resume=ReportResume(A, next_seq))

    def test_goes_on_without_a_snapshot(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 10))
        live(cursor, 10)
        cursor.heartbeat(11, beat(), 10)
        assert kinds(cursor.take()) == ["Greeted", "ReportBatch", "HeartbeatSeen"]
        assert cursor.request is None

    def test_answer_tells_what_was_missed(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 12))
        items = cursor.take()
        assert isinstance(items[1], ReportGap)
        assert (items[1].first_seq, items[1].next_seq) == (10, 12)
        assert cursor.request is not None

    def test_later_answers_overtake_live_messages(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 10))
        cursor.hello(hello(A, 12))
        live(cursor, 10)
        assert kinds(cursor.take()) == ["Greeted", "Greeted", "ReportBatch"]

    def test_heartbeat_tells_what_was_missed(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 10))
        cursor.heartbeat(11, beat(), 10)
        assert kinds(cursor.take()) == ["Greeted", "ReportGap"]

    def test_another_life(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(B, 10))
        assert kinds(cursor.take()) == ["Greeted", "NewEpoch"]
        assert cursor.request is not None

    def test_publisher_behind_what_was_kept_starts_anew(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 4))
        assert kinds(cursor.take()) == ["Greeted", "ReportGap"]
        cursor.asked()
        load(cursor, 4)
        live(cursor, 4)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch"]


class TestGap:
    def test_jump(self) -> None:
        cursor = in_order()
        cursor.events(12, events(dropped=2), 10)
        assert cursor.take() == [ReportGap(10, 12, 2, "seq 12 came next")]
        assert cursor.request is not None
        live(cursor, 13)
        cursor.asked()
        load(cursor, 14)
        live(cursor, 14)
        items = cursor.take()
        assert kinds(items) == ["Loaded", "ReportBatch"]
        assert seqs(items) == [14]

    def test_drops_without_a_jump_are_none(self) -> None:
        cursor = in_order()
        cursor.events(10, events(dropped=3), 10)
        assert kinds(cursor.take()) == ["ReportBatch"]

    def test_heartbeat_and_catalog_show_a_lost_tail(self) -> None:
        cursor = in_order()
        cursor.heartbeat(11, beat(), 10)
        assert kinds(cursor.take()) == ["ReportGap"]
        cursor = in_order()
        cursor.catalog(11, CatalogMessage(A, 1.0, 1, CATALOG))
        assert kinds(cursor.take()) == ["Declared", "ReportGap"]

    def test_stale_messages_are_nothing(self) -> None:
        cursor = in_order()
        live(cursor, 9)
        cursor.heartbeat(9, beat(), 10)
        cursor.catalog(9, CatalogMessage(A, 1.0, 0, CATALOG))
        assert kinds(cursor.take()) == ["Declared"]
        assert cursor.request is None

    def test_unreadable_message_is_a_gap_at_once(self) -> None:
        for epoch in (A, None):
            cursor = in_order()
            cursor.unreadable(10, epoch, 10)
            assert cursor.take() == [ReportGap(10, 11, 0, "seq 10 cannot be read")]

    def test_unreadable_message_among_the_held(self) -> None:
        cursor = greeted()
        cursor.asked()
        live(cursor, 10)
        cursor.unreadable(11, A, 10)
        live(cursor, 12)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch", "ReportGap"]

    def test_damage_begins_no_life(self) -> None:
        cursor = in_order()
        cursor.unreadable(10, B, 10)
        live(cursor, 10)
        assert kinds(cursor.take()) == ["ReportBatch"]

    def test_consumer_asks(self) -> None:
        cursor = in_order()
        cursor.ask_snapshot()
        wanted = cursor.request
        assert wanted is not None
        cursor.ask_snapshot()
        assert cursor.request == wanted
        live(cursor, 10)
        cursor.heartbeat(11, beat(), 10)
        assert cursor.take() == []
        cursor.asked()
        load(cursor, 11)
        assert kinds(cursor.take()) == ["Loaded"]


class TestLives:
    def test_message_of_another_life(self) -> None:
        cursor = in_order()
        live(cursor, 0, epoch=B)
        items = cursor.take()
        assert kinds(items) == ["NewEpoch"]
        assert isinstance(items[0], NewEpoch)
        assert (items[0].epoch, items[0].started_s) == (B, 1.0)
        assert cursor.greeting_wanted
        cursor.asked()
        load(cursor, 1, B)
        live(cursor, 1, epoch=B)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch"]

    def test_last_messages_of_a_life_left_behind_are_nothing(self) -> None:
        cursor = in_order()
        cursor.hello(hello(B))
        cursor.take()
        live(cursor, 10)
        cursor.heartbeat(10, beat(), 10)
        cursor.catalog(10, CatalogMessage(A, 1.0, 1, CATALOG))
        assert cursor.take() == []
        assert cursor.heard == 0

    def test_snapshot_on_its_way_is_void(self) -> None:
        cursor = greeted()
        cursor.asked()
        old = snapshot(cursor, 10)
        live(cursor, 0, epoch=B)
        cursor.asked()
        for part in old:
            cursor.part(part)
        assert kinds(cursor.take()) == ["NewEpoch"]
        load(cursor, 1, B)
        assert kinds(cursor.take()) == ["Loaded"]

    def test_snapshot_decides_which_life_it_is(self) -> None:
        cursor = in_order()
        # From a connection that is closing: the life between the one that we know and the one that answers.
        live(cursor, 3, epoch=B)
        cursor.asked()
        live(cursor, 4, epoch=B)
        load(cursor, 2, C)
        items = cursor.take()
        assert kinds(items) == ["NewEpoch", "NewEpoch", "Loaded"]
        assert cursor.greeting_wanted
        live(cursor, 5, epoch=B)
        live(cursor, 2, epoch=C)
        assert seqs(cursor.take()) == [2]

    def test_a_life_taken_for_past_can_come_back(self) -> None:
        cursor = in_order()
        live(cursor, 3, epoch=B)
        cursor.asked()
        load(cursor, 11, A)
        live(cursor, 11)
        assert kinds(cursor.take()) == ["NewEpoch", "NewEpoch", "Loaded", "ReportBatch"]

    def test_what_is_remembered_of_lives_is_bounded(self) -> None:
        cursor = in_order()
        for life in range(REMEMBERED_EPOCHS + 2):
            live(cursor, 0, epoch=f"{life}")
        cursor.take()
        live(cursor, 0, epoch=A)
        assert kinds(cursor.take()) == ["NewEpoch"]


class TestCatalog:
    def test_a_version_is_declared_once(self) -> None:
        cursor = in_order()
        cursor.catalog(10, CatalogMessage(A, 1.0, 2, CATALOG))
        cursor.catalog(10, CatalogMessage(A, 1.0, 2, CATALOG))
        cursor.hello(hello(catalog_version=1, catalog=CATALOG))
        assert kinds(cursor.take()) == ["Declared", "Greeted"]

    def test_another_life_declares_anew(self) -> None:
        cursor = in_order()
        cursor.catalog(10, CatalogMessage(A, 1.0, 2, CATALOG))
        cursor.catalog(0, CatalogMessage(B, 1.0, 1, CATALOG))
        assert kinds(cursor.take()) == ["Declared", "NewEpoch", "Declared"]

    def test_heartbeat_shows_a_lost_declaration_once(self) -> None:
        cursor = in_order()
        for _ in range(2):
            cursor.heartbeat(10, beat(catalog_version=1), 10)
        assert cursor.greeting_wanted
        cursor.greeting_wanted = False
        cursor.heartbeat(10, beat(catalog_version=1), 10)
        assert not cursor.greeting_wanted
        cursor.heartbeat(10, beat(catalog_version=2), 10)
        assert cursor.greeting_wanted

    def test_no_catalog_is_none_lost(self) -> None:
        cursor = in_order()
        cursor.heartbeat(10, beat(), 10)
        assert not cursor.greeting_wanted


class TestSnapshotAnswers:
    @pytest.mark.parametrize("lost", [0, 1])
    def test_lost_part(self, lost: int) -> None:
        cursor = greeted()
        cursor.asked()
        first = cursor.request
        for index, part in enumerate(snapshot(cursor, 10)):
            if index != lost:
                cursor.part(part)
        assert kinds(cursor.take()) == ["SnapshotFailed"]
        assert cursor.failures == 1
        assert cursor.request not in (None, first)

    def test_another_requests_part_is_nothing(self) -> None:
        cursor = greeted()
        load(cursor, 10)
        cursor.asked()
        first, *rest = snapshot(cursor, 10)
        cursor.part(msgspec.structs.replace(first, id=99))
        for part in (first, *rest):
            cursor.part(part)
        assert kinds(cursor.take()) == ["Loaded"]
        cursor.part(first)
        assert cursor.take() == []

    def test_older_than_what_was_handed_out(self) -> None:
        cursor = in_order()
        live(cursor, 10, 11)
        cursor.ask_snapshot()
        cursor.asked()
        load(cursor, 11)
        assert kinds(cursor.take())[2:] == ["SnapshotFailed"]

    def test_overdue_says_how_far_it_came(self) -> None:
        cursor = greeted()
        cursor.asked()
        cursor.snapshot_overdue()
        cursor.asked()
        cursor.part(snapshot(cursor, 10)[0])
        cursor.snapshot_overdue()
        assert cursor.take() == [SnapshotFailed("no answer"), SnapshotFailed("the answer stopped after 1 parts")]
        assert cursor.failures == 2
        cursor.asked()
        load(cursor, 10)
        assert cursor.failures == 0

    def test_failure_when_none_is_wanted_is_nothing(self) -> None:
        cursor = in_order()
        cursor.snapshot_failed("late")
        assert cursor.take() == []
        assert cursor.request is None

    def test_holding_is_bounded_by_count(self) -> None:
        cursor = greeted(max_held=3)
        cursor.asked()
        live(cursor, *range(10, 20))
        assert cursor.held == 3
        load(cursor, 17)
        assert seqs(cursor.take()) == [17, 18, 19]

    @pytest.mark.parametrize("bound", [{"max_held": 3}, {"max_held_bytes": 30}])
    def test_overflow_asks_again_at_the_next_part(self, bound: dict[str, int]) -> None:
        cursor = greeted(**bound)
        cursor.asked()
        first, *_ = snapshot(cursor, 10)
        live(cursor, *range(10, 20))
        assert (cursor.held, cursor.held_bytes) == (3, 30)
        cursor.part(first)
        assert kinds(cursor.take()) == ["SnapshotFailed"]
        assert cursor.held == 0
        cursor.asked()
        load(cursor, 20)
        assert kinds(cursor.take()) == ["Loaded"]

    def test_one_message_is_held_whatever_its_size(self) -> None:
        cursor = greeted(max_held_bytes=5)
        cursor.asked()
        live(cursor, 10)
        load(cursor, 10)
        assert seqs(cursor.take()) == [10]


class TestNews:
    def test_connections(self) -> None:
        cursor = ReportCursor()
        cursor.disconnected()
        cursor.connected()
        cursor.disconnected()
        cursor.disconnected()
        assert cursor.take() == [Connected(), Disconnected()]

    def test_silence_ends_before_what_ends_it(self) -> None:
        cursor = in_order()
        cursor.silent(3.0)
        cursor.silent(4.0)
        assert cursor.is_silent
        cursor.heartbeat(10, beat(), 10)
        message = beat()
        cursor.heartbeat(10, message, 10)
        assert cursor.take() == [PatchSilent(3.0), PatchHeard(), HeartbeatSeen(10, beat()), HeartbeatSeen(10, message)]
        assert not cursor.is_silent

    def test_malformed_is_counted(self) -> None:
        cursor = ReportCursor()
        cursor.malformed("x")
        assert cursor.take() == [Malformed("x")]
        assert cursor.malformed_messages == 1


LEDGER: Ledger = {(0, "GPU"): Counter((5, 6, 6, 7)), (None, "CPU"): Counter((5, 2**64 - 1))}


class TestAssembly:
    def add(self, *made: SnapshotPart, max_blocks: int = 100) -> Any:
        assembly = SnapshotAssembly(max_blocks)
        whole = None
        for part in made:
            assert whole is None
            whole = assembly.add(part)
        return whole

    def test_whole(self) -> None:
        whole = self.add(*parts(LEDGER, 1, A, 7))
        assert {(place.group_idx, place.medium): sorted(place.hashes.tolist()) for place in whole.places} == {
            key: sorted(held) for key, held in LEDGER.items()
        }
        assert whole.summary == summary(LEDGER)

    @pytest.mark.parametrize(
        ("at", "change"),
        [
            (1, {"epoch": B}),
            (1, {"next_seq": 8}),
            (1, {"started_s": 2.0}),
            (1, {"index": 0}),
            (1, {"index": 2}),
            (1, {"index": MAX_SEQ}),
            (0, {"index": 1}),
            (1, {"hashes": b""}),
            (1, {"hashes": b"1234567"}),
            (1, {"hashes": packed(8)}),
            (1, {"hashes": packed(7, 9)}),
            (1, {"medium": "CPU"}),
            (1, {"group_idx": 1}),
            (1, {"locality": "REMOTE"}),
            (1, {"ownership": "fs"}),
            (1, {"ownership": "f" * (MAX_NAME_CHARS + 1)}),
            (0, {"copied": []}),
            (0, {"copied": [(6, 3)]}),
            (0, {"copied": [(6, 1)]}),
            (0, {"copied": [(9, 2)]}),
            (0, {"copied": [(-1, 2)]}),
            (0, {"copied": [(2**64, 2)]}),
            (0, {"copied": [(6, 2), (6, 2)]}),
            (-1, {"places": []}),
            (-1, {"places": summary(LEDGER) * 2}),
            (-1, {"places": [*summary(LEDGER), PlaceSummary(3, "GPU", 1, 1, 9)]}),
            (-1, {"hashes": packed(1)}),
        ],
    )
    def test_contradictions(self, at: int, change: dict[str, Any]) -> None:
        made = parts(LEDGER, 1, A, 7)
        made[at] = msgspec.structs.replace(made[at], **change)
        with pytest.raises(SnapshotError):
            self.add(*made)

    def test_sum_of_an_empty_place_needs_no_part(self) -> None:
        made = parts(LEDGER, 1, A, 7)
        made[-1] = msgspec.structs.replace(made[-1], places=[*made[-1].places, PlaceSummary(3, "GPU", 0, 0, 0)])
        assert self.add(*made) is not None

    def test_parts_without_blocks_are_refused(self) -> None:
        # Or an answer without end would never reach a bound.
        first, *rest = parts(LEDGER, 1, A, 7)
        made = [first, msgspec.structs.replace(first, hashes=b"", copied=[]), *rest]
        with pytest.raises(SnapshotError, match="no blocks"):
            self.add(*(msgspec.structs.replace(part, index=index) for index, part in enumerate(made)))

    def test_copies_said_twice_are_refused_whatever_the_sum(self) -> None:
        first, last = parts({(0, "GPU"): Counter((6, 6))}, 1, A, 7)
        twice = msgspec.structs.replace(first, copied=[(6, 2), (6, 2)])
        with pytest.raises(SnapshotError, match="copies"):
            self.add(twice, msgspec.structs.replace(last, places=[PlaceSummary(0, "GPU", 1, 3, 6)]))

    def test_blocks_are_bounded(self) -> None:
        assert self.add(*parts(LEDGER, 1, A, 7), max_blocks=5) is not None
        with pytest.raises(SnapshotError, match="more than 4 blocks"):
            self.add(*parts(LEDGER, 1, A, 7), max_blocks=4)

    def test_places_are_bounded(self) -> None:
        ledger = {(group, "GPU"): Counter([1]) for group in range(MAX_PLACES + 1)}
        with pytest.raises(SnapshotError, match="places"):
            self.add(*parts(ledger, 1, A, 7), max_blocks=MAX_PLACES * 2)
