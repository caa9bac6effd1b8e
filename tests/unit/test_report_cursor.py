# SPDX-License-Identifier: Apache-2.0
"""Rules of the report cursor, one by one; test_report_cursor_model.py tests them together."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import ANY

from kvrouter.events.patch.cursor import REMEMBERED_EPOCHS, ReportCursor
from kvrouter.events.patch.items import (
    Declared,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportGap,
    ReportResume,
)
from kvrouter.events.patch.messages import CatalogMessage, PlaceSummary
from kvrouter.events.transport.outbox import Outbox
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Malformed
from tests.support.fake_reporter import parts
from tests.support.report_cursor_steps import (
    CATALOG,
    MAX_SEQ,
    A,
    B,
    C,
    beat,
    events,
    greeted,
    hello,
    in_order,
    kinds,
    live,
    load,
    reload,
    requested,
    seqs,
    snapshot,
)


class TestStart:
    def test_the_first_answer_greets_and_declares_the_catalog(self) -> None:
        cursor = ReportCursor()
        assert cursor.greeting_wanted
        answer = hello(catalog_version=3, catalog=CATALOG)
        cursor.hello(answer)
        assert cursor.take() == [Greeted(answer), Declared(3, CATALOG)]
        assert not cursor.greeting_wanted
        assert cursor.request is not None

    def test_batches_follow_the_snapshot(self) -> None:
        cursor = requested()
        live(cursor, 8, 9, 10, 11)
        assert cursor.take() == []
        assert (cursor.held, cursor.held_bytes) == (4, 40)
        load(cursor, 10)
        items = cursor.take()
        assert kinds(items) == ["Loaded", "ReportBatch", "ReportBatch", "CaughtUp"]
        assert seqs(items) == [10, 11]
        assert cursor.request is None
        assert cursor.held == cursor.held_bytes == 0
        live(cursor, 12)
        assert seqs(cursor.take()) == [12]

    async def test_a_second_snapshot_revokes_that_the_first_was_caught_up(self) -> None:
        box: Outbox[Any] = Outbox(10, 1_000, size_bytes=lambda item: 1, on_room=lambda: None)
        cursor = requested()
        load(cursor, 10)
        box.put(cursor.take())
        # The consumer has not taken the snapshot yet; a gap comes, and the live socket has more when the snapshot
        # ends.
        live(cursor, 12)
        cursor.on_request_sent()
        cursor.set_unread(True)
        load(cursor, 13)
        box.put(cursor.take())
        assert "CaughtUp" not in kinds(await box.take(10))
        taking = asyncio.ensure_future(box.take(10))
        await asyncio.sleep(0)
        assert not taking.done()
        cursor.set_unread(False)
        box.put(cursor.take())
        assert kinds(await taking) == ["CaughtUp"]

    def test_messages_before_the_request_are_in_the_snapshot(self) -> None:
        cursor = greeted()
        live(cursor, 5, MAX_SEQ)
        assert cursor.held == 0
        reload(cursor, 6)
        assert kinds(cursor.take()) == ["Loaded", "CaughtUp"]

    def test_loaded_lists_all_resident_blocks(self) -> None:
        cursor = requested()
        load(cursor, 10)
        item, _ = cursor.take()
        assert isinstance(item, Loaded)
        loaded = item.snapshot
        assert (loaded.epoch, loaded.started_s, loaded.next_seq) == (A, 1.0, 10)
        (place,) = loaded.places
        assert (place.group_idx, place.medium, place.ownership, place.copied) == (0, "GPU", None, [(6, 2)])
        assert place.hashes.tolist() == [5, 6, 7]
        assert loaded.summary == [PlaceSummary(0, "GPU", 3, 4, 18)]
        assert loaded.size_bytes == 24

    def test_an_empty_ledger_loads(self) -> None:
        cursor = requested()
        assert cursor.request is not None
        for part in parts({}, cursor.request, A, 0):
            cursor.part(part)
        item, _ = cursor.take()
        assert isinstance(item, Loaded)
        assert item.snapshot.places == []

    def test_a_snapshot_older_than_the_first_message_is_requested_again(self) -> None:
        cursor = requested()
        first = cursor.request
        live(cursor, 12)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["SnapshotFailed"]
        assert cursor.request not in (None, first)
        reload(cursor, 13)
        assert kinds(cursor.take()) == ["Loaded", "CaughtUp"]

    def test_a_held_heartbeat_reveals_a_lost_message(self) -> None:
        cursor = requested()
        cursor.heartbeat(12, beat(), 10)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["SnapshotFailed"]

    def test_a_held_heartbeat_in_order_is_passed_on(self) -> None:
        cursor = requested()
        cursor.heartbeat(9, beat(), 10)
        live(cursor, 10)
        cursor.heartbeat(11, beat(), 10)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch", "HeartbeatSeen", "CaughtUp"]

    def test_a_gap_among_held_messages_takes_another_snapshot(self) -> None:
        cursor = requested()
        live(cursor, 10, 13)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch", "ReportGap"]
        assert cursor.request is not None
        cursor.on_request_sent()
        live(cursor, 14)
        load(cursor, 14)
        assert seqs(cursor.take()) == [14]


class TestResume:
    def resumed(self, next_seq: int = 10) -> ReportCursor:
        return ReportCursor(resume=ReportResume(A, next_seq))

    def test_a_resume_continues_without_a_snapshot(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 10))
        live(cursor, 10)
        cursor.heartbeat(11, beat(), 10)
        assert kinds(cursor.take()) == ["Greeted", "ReportBatch", "HeartbeatSeen"]
        assert cursor.request is None

    def test_the_first_answer_reveals_missed_messages(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 12))
        assert cursor.take()[0] == ReportGap(10, 12, ANY, ANY)
        assert cursor.request is not None

    def test_later_answers_reveal_nothing_missed(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 10))
        cursor.hello(hello(A, 12))
        live(cursor, 10)
        assert kinds(cursor.take()) == ["Greeted", "Greeted", "ReportBatch"]

    def test_a_heartbeat_reveals_messages_missed_before_the_resume(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 10))
        cursor.heartbeat(11, beat(), 10)
        assert kinds(cursor.take()) == ["Greeted", "ReportGap"]

    def test_another_epoch_voids_the_resume(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(B, 10))
        assert kinds(cursor.take()) == ["NewEpoch", "Greeted"]
        assert cursor.request is not None

    def test_a_publisher_behind_the_resume_starts_over(self) -> None:
        cursor = self.resumed()
        cursor.hello(hello(A, 4))
        assert kinds(cursor.take()) == ["ReportGap", "Greeted"]
        reload(cursor, 4)
        live(cursor, 4)
        assert kinds(cursor.take()) == ["Loaded", "CaughtUp", "ReportBatch"]


class TestGap:
    def test_a_skipped_seq_is_a_gap(self) -> None:
        cursor = in_order()
        cursor.events(12, events(dropped=2), 10)
        assert cursor.take() == [ReportGap(10, 12, 2, "seq 12 came next")]
        assert cursor.request is not None
        live(cursor, 13)
        reload(cursor, 14)
        live(cursor, 14)
        items = cursor.take()
        assert kinds(items) == ["FellBehind", "Loaded", "CaughtUp", "ReportBatch"]
        assert seqs(items) == [14]

    def test_dropped_messages_that_the_snapshot_contains_are_not_missing(self) -> None:
        cursor = in_order()
        cursor.events(11, events(dropped=5), 10)
        assert cursor.take() == [ReportGap(10, 11, 1, "seq 11 came next")]

    def test_dropped_messages_without_a_skipped_seq_are_no_gap(self) -> None:
        cursor = in_order()
        cursor.events(10, events(dropped=3), 10)
        assert kinds(cursor.take()) == ["ReportBatch"]

    def test_heartbeats_and_catalogs_reveal_a_lost_message(self) -> None:
        cursor = in_order()
        cursor.heartbeat(11, beat(), 10)
        assert kinds(cursor.take()) == ["ReportGap"]
        cursor = in_order()
        cursor.catalog(11, CatalogMessage(A, 1.0, 1, CATALOG))
        assert kinds(cursor.take()) == ["Declared", "ReportGap"]

    def test_stale_messages_change_nothing(self) -> None:
        cursor = in_order()
        live(cursor, 9)
        cursor.heartbeat(9, beat(), 10)
        cursor.catalog(9, CatalogMessage(A, 1.0, 0, CATALOG))
        assert kinds(cursor.take()) == ["Declared"]
        assert cursor.request is None

    def test_an_unreadable_message_is_a_gap_at_once(self) -> None:
        for epoch in (A, None):
            cursor = in_order()
            cursor.unreadable(10, epoch, 10)
            assert cursor.take() == [ReportGap(10, 11, 0, "seq 10 cannot be read")]

    def test_an_unreadable_held_message_is_a_gap(self) -> None:
        cursor = requested()
        live(cursor, 10)
        cursor.unreadable(11, A, 10)
        live(cursor, 12)
        load(cursor, 10)
        assert kinds(cursor.take()) == ["Loaded", "ReportBatch", "ReportGap"]

    def test_a_damaged_message_begins_no_epoch(self) -> None:
        cursor = in_order()
        cursor.unreadable(10, B, 10)
        live(cursor, 10)
        assert kinds(cursor.take()) == ["ReportBatch"]

    def test_a_request_of_the_consumer_takes_a_snapshot(self) -> None:
        cursor = in_order()
        cursor.request_snapshot()
        request = cursor.request
        assert request is not None
        cursor.request_snapshot()
        assert cursor.request == request
        live(cursor, 10)
        cursor.heartbeat(11, beat(), 10)
        assert cursor.take() == []
        reload(cursor, 11)
        assert kinds(cursor.take()) == ["FellBehind", "Loaded", "CaughtUp"]


class TestLives:
    def test_a_message_of_another_epoch_takes_a_snapshot(self) -> None:
        cursor = in_order()
        live(cursor, 0, epoch=B)
        assert cursor.take() == [NewEpoch(B, 1.0, ANY)]
        assert cursor.greeting_wanted
        cursor.hello(hello(B, 1))
        reload(cursor, 1, B)
        live(cursor, 1, epoch=B)
        assert kinds(cursor.take()) == ["Greeted", "FellBehind", "Loaded", "CaughtUp", "ReportBatch"]

    def test_no_snapshot_is_requested_before_the_life_says_what_it_declares(self) -> None:
        cursor = in_order()
        live(cursor, 0, epoch=B)
        assert cursor.greeting_wanted and cursor.request is None
        cursor.hello(hello(B, 1, catalog_version=1, catalog=CATALOG))
        assert kinds(cursor.take()) == ["NewEpoch", "Greeted", "Declared"]
        assert cursor.request is not None
        cursor.expire()
        assert cursor.greeting_wanted and cursor.request is None

    def test_late_messages_of_a_past_epoch_change_nothing(self) -> None:
        cursor = in_order()
        cursor.hello(hello(B))
        cursor.take()
        live(cursor, 10)
        cursor.heartbeat(10, beat(), 10)
        cursor.catalog(10, CatalogMessage(A, 1.0, 1, CATALOG))
        assert cursor.take() == []
        assert cursor.heard == 0

    def test_a_new_epoch_voids_the_snapshot_under_way(self) -> None:
        cursor = requested()
        old = snapshot(cursor, 10)
        live(cursor, 0, epoch=B)
        cursor.hello(hello(B, 1))
        cursor.on_request_sent()
        for part in old:
            cursor.part(part)
        assert kinds(cursor.take()) == ["NewEpoch", "Greeted"]
        load(cursor, 1, B)
        assert kinds(cursor.take()) == ["Loaded", "CaughtUp"]

    def test_a_snapshot_of_another_epoch_begins_a_life(self) -> None:
        cursor = in_order()
        # The message comes from a connection that is closing: its life lies between the known one and the one that
        # answers.
        live(cursor, 3, epoch=B)
        cursor.hello(hello(B, 4))
        cursor.on_request_sent()
        live(cursor, 4, epoch=B)
        load(cursor, 2, C)
        assert kinds(cursor.take()) == ["NewEpoch", "Greeted", "NewEpoch"]
        assert cursor.greeting_wanted and cursor.request is None
        cursor.hello(hello(C, 2))
        reload(cursor, 2, C)
        live(cursor, 5, epoch=B)
        live(cursor, 2, epoch=C)
        items = cursor.take()
        assert kinds(items) == ["Greeted", "FellBehind", "Loaded", "CaughtUp", "ReportBatch"] and seqs(items) == [2]

    def test_a_past_epoch_can_come_back_by_an_answer(self) -> None:
        cursor = in_order()
        live(cursor, 3, epoch=B)
        cursor.hello(hello(A, 11))
        reload(cursor, 11, A)
        live(cursor, 11)
        news = ["NewEpoch", "NewEpoch", "Greeted", "FellBehind", "Loaded", "CaughtUp", "ReportBatch"]
        assert kinds(cursor.take()) == news

    def test_remembered_epochs_are_bounded(self) -> None:
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

    def test_another_epoch_declares_its_own_catalog(self) -> None:
        cursor = in_order()
        cursor.catalog(10, CatalogMessage(A, 1.0, 2, CATALOG))
        cursor.catalog(0, CatalogMessage(B, 1.0, 1, CATALOG))
        assert kinds(cursor.take()) == ["Declared", "NewEpoch", "Declared"]

    def test_a_heartbeat_reveals_a_lost_catalog_once(self) -> None:
        cursor = in_order()
        for _ in range(2):
            cursor.heartbeat(10, beat(catalog_version=1), 10)
        assert cursor.greeting_wanted
        cursor.greeting_wanted = False
        cursor.heartbeat(10, beat(catalog_version=1), 10)
        assert not cursor.greeting_wanted
        cursor.heartbeat(10, beat(catalog_version=2), 10)
        assert cursor.greeting_wanted

    def test_a_heartbeat_without_a_catalog_requests_none(self) -> None:
        cursor = in_order()
        cursor.heartbeat(10, beat(), 10)
        assert not cursor.greeting_wanted


class TestNews:
    def test_connections_are_reported_once(self) -> None:
        cursor = ReportCursor()
        cursor.disconnected()
        cursor.connected()
        cursor.disconnected()
        cursor.disconnected()
        assert cursor.take() == [Connected(), Disconnected()]

    def test_the_end_of_silence_comes_before_the_message_that_ends_it(self) -> None:
        cursor = in_order()
        cursor.silent(3.0)
        cursor.silent(4.0)
        assert cursor.is_silent
        cursor.heartbeat(10, beat(), 10)
        message = beat()
        cursor.heartbeat(10, message, 10)
        assert cursor.take() == [PatchSilent(3.0), PatchHeard(), HeartbeatSeen(10, beat()), HeartbeatSeen(10, message)]
        assert not cursor.is_silent

    def test_malformed_messages_are_reported(self) -> None:
        cursor = ReportCursor()
        cursor.malformed("x")
        assert cursor.take() == [Malformed("x")]
