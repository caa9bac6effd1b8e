# SPDX-License-Identifier: Apache-2.0
"""A backlog's one commit has the same effect as its flushes committed one by one, whatever the flushes were."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.commit_backlog import CommitBacklog
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from tests.support.examples import examples
from tests.support.store_image import StoreImage

PLACES = (Place(0, "GPU"), Place(1, "GPU"), Place(None, "CPU", "o"))
EXAMPLES = examples(300)


def seen(stored: StoreImage) -> tuple[Any, ...]:
    """Return all that commits have left."""
    return stored.epoch, stored.seq, stored.residency(), stored.copies, stored.meta


@st.composite
def flushes(draw: st.DrawFn) -> list[PendingCommit]:
    """Draw flushes of one worker in order, as an ingest makes them; each flush is possible after the previous one."""
    flushes_drawn: list[PendingCommit] = []
    held: dict[Place, set[int]] = {place: set() for place in PLACES}
    epoch, seq = 0, 0
    for number in range(draw(st.integers(1, 12))):
        opens = number == 0 or draw(st.integers(0, 5)) == 0
        if opens:
            epoch += 1
            held = {place: set() for place in PLACES}
        changes = []
        for place in draw(st.sets(st.sampled_from(PLACES))):
            touched = draw(st.sets(st.integers(0, 7)))
            added, removed = touched - held[place], touched & held[place]
            held[place] ^= touched
            changes.append(
                ResidencyDelta(place, np.array(sorted(added), np.uint64), np.array(sorted(removed), np.uint64))
            )
        copies = draw(st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 7), st.integers(0, 4)), max_size=3))
        meta = draw(st.dictionaries(st.sampled_from("ab"), st.binary(max_size=1)))
        seqs = None
        if not opens or draw(st.booleans()):
            seqs = (seq, seq + draw(st.integers(0, 2)))
            seq = seqs[1] + 1
        else:
            # A new epoch in which nothing was reported yet.
            changes, copies = [], []
            held = {place: set() for place in PLACES}
        flushes_drawn.append(PendingCommit(f"e{epoch}", opens, seqs, changes, copies, meta))
    return flushes_drawn


@settings(max_examples=EXAMPLES)
@given(flushes=flushes(), data=st.data())
def test_one_commit_does_what_the_flushes_would_have_done(flushes: list[PendingCommit], data: st.DataObject) -> None:
    one_by_one, merged, backlog = StoreImage(), StoreImage(), CommitBacklog(1_000_000)
    for flush in flushes:
        one_by_one.commit(flush, None)
        backlog.add(flush)
        if data.draw(st.booleans()):
            # Without a seq in the epoch, nothing shows whether an earlier commit was lost.
            assert merged.seq is None or backlog.continues(merged.epoch, merged.seq)
            taken = backlog.take()
            assert taken is not None
            merged.commit(taken, None)
            assert backlog.is_empty and backlog.blocks == 0 and backlog.take() is None
            assert seen(merged) == seen(one_by_one)
    if (taken := backlog.take()) is not None:
        merged.commit(taken, None)
    assert seen(merged) == seen(one_by_one)


@settings(max_examples=EXAMPLES)
@given(flushes=flushes(), lost=st.integers(0, 11))
def test_after_an_overflow_only_a_new_epoch_is_committed(flushes: list[PendingCommit], lost: int) -> None:
    backlog, stored = CommitBacklog(1_000_000), StoreImage()
    for flush in flushes[: lost + 1]:
        backlog.add(flush)
    backlog.overflow()
    assert not backlog.is_empty and backlog.take() is None and not backlog.continues(flushes[0].epoch, 0)
    rest = flushes[lost + 1 :]
    for flush in rest:
        backlog.add(flush)
    taken = backlog.take()
    assert (taken is not None) is any(flush.opens_epoch for flush in rest)
    assert backlog.overflowed is (taken is None)
    if taken is not None:
        stored.commit(taken, None)
        expected = StoreImage()
        first = next(number for number, flush in enumerate(rest) if flush.opens_epoch)
        for flush in rest[first:]:
            expected.commit(flush, None)
        assert seen(stored) == seen(expected)


def test_a_backlog_is_full_beyond_its_bound() -> None:
    backlog = CommitBacklog(2)
    three = np.arange(3, dtype=np.uint64)
    backlog.add(PendingCommit("e", True, (0, 0), [ResidencyDelta(PLACES[0], three[:2], three[:0])], [], {}))
    assert not backlog.is_full and backlog.blocks == 2
    backlog.add(
        PendingCommit("e", False, (1, 1), [ResidencyDelta(PLACES[0], three[2:], three[:0])], [(PLACES[0], 0, 2)], {})
    )
    assert backlog.is_full and backlog.blocks == 4
    backlog.overflow()
    assert not backlog.is_full and backlog.blocks == 0
