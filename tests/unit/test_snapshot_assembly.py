# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the answers that the report cursor takes, and the assembly of their parts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvrouter.events.patch.items import SnapshotFailed
from kvrouter.events.patch.messages import PlaceSummary, SnapshotPart
from kvrouter.events.patch.snapshot_assembly import MAX_PLACES, SnapshotAssembly, SnapshotError
from kvrouter.events.vllm.messages import MAX_NAME_CHARS
from tests.support.fake_reporter import Ledger, packed, parts, summary
from tests.support.report_cursor_steps import (
    MAX_SEQ,
    A,
    B,
    greeted,
    in_order,
    kinds,
    live,
    load,
    reload,
    requested,
    seqs,
    snapshot,
)

LEDGER: Ledger = {(0, "GPU"): Counter((5, 6, 6, 7)), (None, "CPU"): Counter((5, 2**64 - 1))}


class TestSnapshotAnswers:
    @pytest.mark.parametrize("lost", [0, 1])
    def test_a_lost_part_fails_the_snapshot(self, lost: int) -> None:
        cursor = requested()
        first = cursor.request
        for index, part in enumerate(snapshot(cursor, 10)):
            if index != lost:
                cursor.part(part)
        assert kinds(cursor.take()) == ["SnapshotFailed"]
        assert cursor.failures == 1
        assert cursor.request not in (None, first)

    def test_a_part_of_another_request_changes_nothing(self) -> None:
        cursor = greeted()
        load(cursor, 10)
        cursor.on_request_sent()
        first, *rest = snapshot(cursor, 10)
        cursor.part(msgspec.structs.replace(first, id=99))
        for part in (first, *rest):
            cursor.part(part)
        assert kinds(cursor.take()) == ["Loaded", "CaughtUp"]
        cursor.part(first)
        assert cursor.take() == []

    def test_a_snapshot_older_than_the_last_batch_fails(self) -> None:
        cursor = in_order()
        live(cursor, 10, 11)
        cursor.request_snapshot()
        reload(cursor, 11)
        assert kinds(cursor.take())[2:] == ["SnapshotFailed"]

    def test_an_overdue_snapshot_names_the_parts_received(self) -> None:
        cursor = requested()
        cursor.snapshot_overdue()
        cursor.on_request_sent()
        cursor.part(snapshot(cursor, 10)[0])
        cursor.snapshot_overdue()
        assert cursor.take() == [SnapshotFailed("no answer"), SnapshotFailed("the answer stopped after 1 parts")]
        assert cursor.failures == 2
        reload(cursor, 10)
        assert cursor.failures == 0

    def test_a_failure_without_a_request_changes_nothing(self) -> None:
        cursor = in_order()
        cursor.snapshot_failed("late")
        assert cursor.take() == []
        assert cursor.request is None

    def test_held_messages_are_bounded_by_count(self) -> None:
        cursor = requested(max_held=3)
        live(cursor, *range(10, 20))
        assert cursor.held == 3
        load(cursor, 17)
        assert seqs(cursor.take()) == [17, 18, 19]

    @pytest.mark.parametrize("bound", [{"max_held": 3}, {"max_held_bytes": 30}])
    def test_an_overflow_requests_again_at_the_next_part(self, bound: dict[str, int]) -> None:
        cursor = requested(**bound)
        first, *_ = snapshot(cursor, 10)
        live(cursor, *range(10, 20))
        assert (cursor.held, cursor.held_bytes) == (3, 30)
        cursor.part(first)
        assert kinds(cursor.take()) == ["SnapshotFailed"]
        assert cursor.held == 0
        reload(cursor, 20)
        assert kinds(cursor.take()) == ["Loaded", "CaughtUp"]

    def test_one_message_of_any_size_is_held(self) -> None:
        cursor = requested(max_held_bytes=5)
        live(cursor, 10)
        load(cursor, 10)
        assert seqs(cursor.take()) == [10]


class TestAssembly:
    def add(self, *made: SnapshotPart, max_blocks: int = 100) -> Any:
        assembly = SnapshotAssembly(max_blocks)
        whole = None
        for part in made:
            assert whole is None
            whole = assembly.add(part)
        return whole

    def test_all_parts_make_the_snapshot(self) -> None:
        loaded = self.add(*parts(LEDGER, 1, A, 7))
        assert {(place.group_idx, place.medium): sorted(place.hashes.tolist()) for place in loaded.places} == {
            key: sorted(held) for key, held in LEDGER.items()
        }
        assert loaded.summary == summary(LEDGER)

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
    def test_contradicting_parts_are_refused(self, at: int, change: dict[str, Any]) -> None:
        changed = parts(LEDGER, 1, A, 7)
        changed[at] = msgspec.structs.replace(changed[at], **change)
        with pytest.raises(SnapshotError):
            self.add(*changed)

    def test_the_summary_of_an_empty_place_needs_no_part(self) -> None:
        changed = parts(LEDGER, 1, A, 7)
        changed[-1] = msgspec.structs.replace(
            changed[-1], places=[*changed[-1].places, PlaceSummary(3, "GPU", 0, 0, 0)]
        )
        assert self.add(*changed) is not None

    def test_parts_without_blocks_are_refused(self) -> None:
        # Without this rule, an answer without end would never reach a bound.
        first, *rest = parts(LEDGER, 1, A, 7)
        padded = [first, msgspec.structs.replace(first, hashes=b"", copied=[]), *rest]
        with pytest.raises(SnapshotError, match="no blocks"):
            self.add(*(msgspec.structs.replace(part, index=index) for index, part in enumerate(padded)))

    def test_copies_listed_twice_are_refused(self) -> None:
        first, last = parts({(0, "GPU"): Counter((6, 6))}, 1, A, 7)
        twice = msgspec.structs.replace(first, copied=[(6, 2), (6, 2)])
        with pytest.raises(SnapshotError, match="copies"):
            self.add(twice, msgspec.structs.replace(last, places=[PlaceSummary(0, "GPU", 1, 3, 6)]))

    def test_snapshot_blocks_are_bounded(self) -> None:
        assert self.add(*parts(LEDGER, 1, A, 7), max_blocks=5) is not None
        with pytest.raises(SnapshotError, match="more than 4 blocks"):
            self.add(*parts(LEDGER, 1, A, 7), max_blocks=4)

    def test_snapshot_places_are_bounded(self) -> None:
        ledger: dict[tuple[int | None, str], Counter[int]] = {
            (group, "GPU"): Counter([1]) for group in range(MAX_PLACES + 1)
        }
        with pytest.raises(SnapshotError, match="places"):
            self.add(*parts(ledger, 1, A, 7), max_blocks=MAX_PLACES * 2)
