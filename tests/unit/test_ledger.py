# SPDX-License-Identifier: Apache-2.0
"""What the ledger counts, forgets and freezes."""

from __future__ import annotations

import pytest

from kvrouter.engine_patch.reporter.ledger import Ledger
from kvrouter.events.patch.messages import PlaceSummary, ReportCleared, ReportEvent, ReportStored, unpack_hashes
from tests.support.report_peer import removed, stored

BIG = 2**64 - 1


def ledger(*events: ReportEvent, max_blocks: int = 1_000_000) -> Ledger:
    made = Ledger(max_blocks)
    for event in events:
        made.apply(event)
    return made


def test_digest_is_the_sum_of_distinct_hashes() -> None:
    made = ledger(stored([BIG, 5]), stored([5]))
    assert made.places() == [PlaceSummary(0, "GPU", blocks=2, copies=3, digest=4)]


def test_one_removal_takes_one_copy() -> None:
    made = ledger(stored([7, 7, 8]), removed([7]))
    assert made.places() == [PlaceSummary(0, "GPU", 2, 2, 15)]
    made.apply(removed([7]))
    assert made.places() == [PlaceSummary(0, "GPU", 1, 1, 8)]


def test_an_unknown_removal_changes_nothing() -> None:
    made = ledger(stored([7]), removed([7, 7, 9]), removed([7], "CPU"))
    assert made.places() == []
    assert made.unknown_removals == 3
    made.apply(stored([7]))
    assert made.places() == [PlaceSummary(0, "GPU", 1, 1, 7)]


def test_places_are_told_apart() -> None:
    made = ledger(
        stored([1]),
        stored([1], group_idx=None),
        stored([1], "CPU"),
        stored([1], "CPU", ownership="disk"),
        stored([1], "CPU", locality="REMOTE"),
    )
    assert made.blocks == len(made.places()) == 5


def test_a_clear_takes_one_medium_of_every_owner_or_of_one() -> None:
    everything = [
        stored([1]),
        stored([2], "CPU"),
        stored([3], "CPU", ownership="a"),
        stored([4], "CPU", 1, ownership="b"),
    ]
    assert [place.digest for place in ledger(*everything, ReportCleared("CPU")).places()] == [1]
    assert [place.digest for place in ledger(*everything, ReportCleared("CPU", ownership="a")).places()] == [1, 2, 4]


def test_no_hashes_is_no_place() -> None:
    assert ledger(stored([])).places() == []


def test_half_a_hash_is_an_error() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        ledger(ReportStored(b"123", 0, "GPU"))


def test_the_largest_medium_is_forgotten_beyond_the_bound() -> None:
    made = ledger(stored([1, 2]), stored([1, 2, 3, 4], "FS"), max_blocks=6)
    assert made.untracked == []
    assert made.report([stored([3])]) == [made_of(3), ReportCleared("FS", "untracked")]
    assert (made.blocks, made.untracked) == (3, ["FS"])
    # Nothing more is said of it, not even its removals.
    assert made.report([stored([9], "FS"), removed([1], "FS")]) == []
    # One owner's clear says nothing of the others.
    made.report([ReportCleared("FS", ownership="a")])
    assert made.untracked == ["FS"]
    clear = ReportCleared("FS")
    assert made.report([clear, stored([9], "FS")]) == [clear, made_of(9)]
    assert (made.blocks, made.untracked) == (4, [])


def test_one_event_beyond_the_bound_forgets_its_own_medium() -> None:
    made = ledger(max_blocks=5)
    assert made.report([stored(range(6))]) == [made_of(*range(6)), ReportCleared("GPU", "untracked")]
    assert (made.blocks, made.places()) == (0, [])


class made_of:
    """Equals a stored event with these hashes: the events themselves compare by identity."""

    def __init__(self, *hashes: int) -> None:
        self.hashes = list(hashes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReportStored) and unpack_hashes(other.hashes).tolist() == self.hashes


def test_frozen_stays_as_it_was() -> None:
    made = ledger(stored([1, 2, 2, BIG]), stored([5], "CPU", 3, ownership="a"))
    frozen = made.freeze()
    made.apply(stored([1, 9]))
    made.apply(removed([2, 2, BIG]))
    made.apply(ReportCleared("CPU"))
    assert [list(place.slices(2)) for place in frozen.places] == [
        [((1).to_bytes(8, "big") + (2).to_bytes(8, "big"), [(2, 2)]), (BIG.to_bytes(8, "big"), [])],
        [((5).to_bytes(8, "big"), [])],
    ]
    assert frozen.summaries() == [PlaceSummary(0, "GPU", 3, 4, 2), PlaceSummary(3, "CPU", 1, 1, 5, "a")]


def test_many_blocks_come_and_go() -> None:
    # More than one merge of what is new with what was there, and of what is gone.
    made = ledger()
    for start in range(0, 50_000, 500):
        made.apply(stored(range(start, start + 500)))
        made.apply(stored(range(start, start + 250)))
    for start in range(0, 50_000, 1_000):
        made.apply(removed(range(start, start + 500)))
    left = [n for n in range(50_000) if n % 1_000 >= 500 or n % 500 < 250]
    copies = sum(2 if n % 500 < 250 and n % 1_000 >= 500 else 1 for n in left)
    assert made.places() == [PlaceSummary(0, "GPU", len(left), copies, sum(left))]
    (place,) = made.freeze().places
    assert place.hashes.tolist() == left
    assert place.copied.tolist() == [n for n in left if n % 500 < 250 and n % 1_000 >= 500]
