# SPDX-License-Identifier: Apache-2.0
"""Counting, forgetting and freezing of blocks by the ledger."""

from __future__ import annotations

import pytest

from kvrouter.engine_patch.reporter.ledger import Ledger
from kvrouter.events.patch.messages import PlaceSummary, ReportCleared, ReportEvent, ReportStored, unpack_hashes
from tests.support.report_peer import removed, stored

BIG = 2**64 - 1


def ledger(*events: ReportEvent, max_blocks: int = 1_000_000) -> Ledger:
    filled_ledger = Ledger(max_blocks)
    for event in events:
        filled_ledger.apply(event)
    return filled_ledger


def test_digest_is_the_sum_of_distinct_hashes() -> None:
    filled_ledger = ledger(stored([BIG, 5]), stored([5]))
    assert filled_ledger.places() == [PlaceSummary(0, "GPU", blocks=2, copies=3, digest=4)]


def test_one_removal_takes_one_copy() -> None:
    filled_ledger = ledger(stored([7, 7, 8]), removed([7]))
    assert filled_ledger.places() == [PlaceSummary(0, "GPU", 2, 2, 15)]
    filled_ledger.apply(removed([7]))
    assert filled_ledger.places() == [PlaceSummary(0, "GPU", 1, 1, 8)]


def test_an_unknown_removal_changes_nothing() -> None:
    filled_ledger = ledger(stored([7]), removed([7, 7, 9]), removed([7], "CPU"))
    assert filled_ledger.places() == []
    assert filled_ledger.unknown_removals == 3
    filled_ledger.apply(stored([7]))
    assert filled_ledger.places() == [PlaceSummary(0, "GPU", 1, 1, 7)]


def test_places_are_distinguished() -> None:
    filled_ledger = ledger(
        stored([1]),
        stored([1], group_idx=None),
        stored([1], "CPU"),
        stored([1], "CPU", ownership="disk"),
        stored([1], "CPU", locality="REMOTE"),
    )
    assert filled_ledger.blocks == len(filled_ledger.places()) == 5


def test_a_clear_takes_one_medium_of_every_owner_or_of_one() -> None:
    everything = [
        stored([1]),
        stored([2], "CPU"),
        stored([3], "CPU", ownership="a"),
        stored([4], "CPU", 1, ownership="b"),
    ]
    assert [place.digest for place in ledger(*everything, ReportCleared("CPU")).places()] == [1]
    assert [place.digest for place in ledger(*everything, ReportCleared("CPU", ownership="a")).places()] == [1, 2, 4]


def test_an_event_without_hashes_makes_no_place() -> None:
    assert ledger(stored([])).places() == []


def test_half_a_hash_is_an_error() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        ledger(ReportStored(b"123", 0, "GPU"))


def test_the_largest_medium_is_forgotten_beyond_the_bound() -> None:
    filled_ledger = ledger(stored([1, 2]), stored([1, 2, 3, 4], "FS"), max_blocks=6)
    assert filled_ledger.untracked == []
    assert filled_ledger.report([stored([3])]) == [made_of(3), ReportCleared("FS", "untracked")]
    assert (filled_ledger.blocks, filled_ledger.untracked) == (3, ["FS"])
    # The ledger reports nothing more of this medium, not even its removals.
    assert filled_ledger.report([stored([9], "FS"), removed([1], "FS")]) == []
    # The clear of one owner says nothing about the others.
    filled_ledger.report([ReportCleared("FS", ownership="a")])
    assert filled_ledger.untracked == ["FS"]
    clear = ReportCleared("FS")
    assert filled_ledger.report([clear, stored([9], "FS")]) == [clear, made_of(9)]
    assert (filled_ledger.blocks, filled_ledger.untracked) == (4, [])


def test_one_event_beyond_the_bound_forgets_its_own_medium() -> None:
    filled_ledger = ledger(max_blocks=5)
    assert filled_ledger.report([stored(range(6))]) == [made_of(*range(6)), ReportCleared("GPU", "untracked")]
    assert (filled_ledger.blocks, filled_ledger.places()) == (0, [])


class made_of:
    """Matcher that equals a stored event with these hashes, because events themselves compare by identity."""

    def __init__(self, *hashes: int) -> None:
        self.hashes = list(hashes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReportStored) and unpack_hashes(other.hashes).tolist() == self.hashes


def test_a_frozen_ledger_does_not_change() -> None:
    filled_ledger = ledger(stored([1, 2, 2, BIG]), stored([5], "CPU", 3, ownership="a"))
    frozen = filled_ledger.freeze()
    filled_ledger.apply(stored([1, 9]))
    filled_ledger.apply(removed([2, 2, BIG]))
    filled_ledger.apply(ReportCleared("CPU"))
    assert [list(place.slices(2)) for place in frozen.places] == [
        [((1).to_bytes(8, "big") + (2).to_bytes(8, "big"), [(2, 2)]), (BIG.to_bytes(8, "big"), [])],
        [((5).to_bytes(8, "big"), [])],
    ]
    assert frozen.summaries() == [PlaceSummary(0, "GPU", 3, 4, 2), PlaceSummary(3, "CPU", 1, 1, 5, "a")]


def test_the_digest_is_right_after_many_changes() -> None:
    # These counts need more than one merge of new blocks with earlier ones, and of removed blocks.
    filled_ledger = ledger()
    for start in range(0, 50_000, 500):
        filled_ledger.apply(stored(range(start, start + 500)))
        filled_ledger.apply(stored(range(start, start + 250)))
    for start in range(0, 50_000, 1_000):
        filled_ledger.apply(removed(range(start, start + 500)))
    remaining = [n for n in range(50_000) if n % 1_000 >= 500 or n % 500 < 250]
    copies = sum(2 if n % 500 < 250 and n % 1_000 >= 500 else 1 for n in remaining)
    assert filled_ledger.places() == [PlaceSummary(0, "GPU", len(remaining), copies, sum(remaining))]
    (place,) = filled_ledger.freeze().places
    assert place.hashes.tolist() == remaining
    assert place.copied.tolist() == [n for n in remaining if n % 500 < 250 and n % 1_000 >= 500]
