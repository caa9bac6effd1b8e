# SPDX-License-Identifier: Apache-2.0
"""Random changes to a ledger against plain counters.

The ledger and its frozen copies equal the counters, and a reader that applied every report has the ledger's state.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from kvrouter.engine_patch.reporter import hash_counts
from kvrouter.engine_patch.reporter.ledger import FrozenLedger, Ledger, Scope
from kvrouter.engine_patch.reporter.snapshots import Moment, parts
from kvrouter.events.patch.messages import PlaceSummary, ReportCleared, ReportEvent, pack_hashes
from tests.support.report_peer import Copies, apply, copies_of, removed, stored, summed

# Few values, so that they repeat, and from both ends of the range, so that sums overflow.
hashes = st.lists(st.integers(0, 12) | st.integers(2**64 - 4, 2**64 - 1), max_size=8)
media = st.sampled_from(["GPU", "CPU", "FS"])
groups = st.sampled_from([None, 0, 1])
owners = st.sampled_from([None, None, "a"])
changes = st.builds(
    lambda make, numbers, medium, group_idx, owner: make(numbers, medium, group_idx, ownership=owner),
    st.sampled_from([stored, stored, removed]),
    hashes,
    media,
    groups,
    owners,
)
clears = st.builds(lambda medium, owner: ReportCleared(medium, ownership=owner), media, owners)
events = changes | changes | changes | clears
scripts = st.lists(st.lists(events, max_size=5), max_size=12)


def by_place(places: list[PlaceSummary]) -> dict[tuple[int | None, str, str | None], tuple[int, int, int]]:
    return {(at.group_idx, at.medium, at.ownership): (at.blocks, at.copies, at.digest) for at in places}


def frozen_copies(frozen: FrozenLedger) -> Copies:
    return copies_of(parts(Moment("", 0.0, 0, frozen), 0))


@given(scripts, st.integers(0, 6))
def test_ledger_equals_counters(script: list[list[ReportEvent]], merge_at: int) -> None:
    with MonkeyPatch.context() as patch:
        patch.setattr(hash_counts, "MERGE_AT", merge_at)
        ledger = Ledger(10_000)
        model: Copies = Counter()
        kept: list[tuple[FrozenLedger, Copies]] = []
        for number, group in enumerate(script):
            assert ledger.report(group) == group
            apply(model, group)
            assert by_place(ledger.places()) == summed(model)
            assert ledger.blocks == len(model)
            if number % 3 == 0:
                kept.append((ledger.freeze(), Counter(model)))
        for frozen, expected in kept:
            assert frozen_copies(frozen) == expected
            assert by_place(frozen.summaries()) == summed(expected)


@given(scripts, st.integers(1, 12))
def test_a_bounded_ledger_equals_what_its_readers_received(script: list[list[ReportEvent]], max_blocks: int) -> None:
    ledger = Ledger(max_blocks)
    reader: Copies = Counter()
    truth: Copies = Counter()
    for group in script:
        apply(reader, ledger.report(group))
        apply(truth, group)
        assert by_place(ledger.places()) == summed(reader)
        assert ledger.blocks <= max_blocks
        # The reader never has more copies than the engine, and none of a medium that is untracked.
        assert not reader - truth
        assert not {key[1] for key in reader} & set(ledger.untracked)


@given(scripts, st.lists(st.tuples(st.integers(0, 12), st.sampled_from(Scope)), max_size=3), st.integers(1, 12))
def test_what_is_withheld_is_taken_from_readers_and_stays_away(
    script: list[list[ReportEvent]], withheld: list[tuple[int, Scope]], max_blocks: int
) -> None:
    """Withhold scopes at random moments; from then on readers hold no block of such a scope."""
    ledger = Ledger(max_blocks)
    reader: Copies = Counter()
    scope = Scope.NOTHING
    for number, group in enumerate(script):
        for _, more in (step for step in withheld if step[0] == number):
            apply(reader, ledger.withhold(more, "failed"))
            scope = max(scope, more)
        assert not any(scope.covers(key[1]) for key in reader)
        apply(reader, ledger.report(group))
        assert not any(scope.covers(key[1]) for key in reader)
        assert by_place(ledger.places()) == summed(reader)


@given(hashes, hashes)
def test_packed_slices_join_to_the_whole(first: list[int], second: list[int]) -> None:
    ledger = Ledger(10_000)
    ledger.apply(stored(first))
    ledger.apply(stored(second))
    for size in (1, 3, 100):
        for place in ledger.freeze().places:
            slices = list(place.slices(size))
            assert b"".join(packed for packed, _ in slices) == pack_hashes(sorted(set(first + second)))
            several = {n: count for n, count in Counter(first + second).items() if count > 1}
            assert dict(pair for _, copied in slices for pair in copied) == several
