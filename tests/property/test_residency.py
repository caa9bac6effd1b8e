# SPDX-License-Identifier: Apache-2.0
"""Random additions, removals, clears, replacements and flushes against plain counters."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrouter.router.base.common.ids import CPU, GPU, Place
from kvrouter.router.index.ingest.residency import PlaceSum, Residency

PLACES = st.sampled_from([Place(0, GPU), Place(1, GPU), Place(0, CPU), Place(0, "STORAGE", "fs")])
HASHES = st.lists(st.integers(1, 12).map(lambda n: n * 0x9E3779B97F4A7C15 & (2**64 - 1)), max_size=6)
COPIES = st.dictionaries(st.integers(1, 12).map(lambda n: n * 0x9E3779B97F4A7C15 & (2**64 - 1)), st.integers(1, 4))


def array(hashes: list[int]) -> np.ndarray:
    return np.array(hashes, np.uint64)


class Machine(RuleBasedStateMachine):
    """The blocks of one worker and their model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Residency()
        # Copies by place and hash.
        self.model: dict[Place, Counter[int]] = {}
        # The changes and the copies that were flushed so far.
        self.flushed: dict[Place, set[int]] = {}
        self.flushed_copies: dict[tuple[Place, int], int] = {}

    def at(self, place: Place) -> Counter[int]:
        return self.model.setdefault(place, Counter())

    @rule(place=PLACES, hashes=HASHES)
    def add_copies(self, place: Place, hashes: list[int]) -> None:
        self.blocks.add_copies(place, array(hashes))
        self.at(place).update(hashes)

    @rule(place=PLACES, hashes=HASHES)
    def remove_copies(self, place: Place, hashes: list[int]) -> None:
        self.blocks.remove_copies(place, array(hashes))
        for block_hash in hashes:
            if self.at(place)[block_hash] > 0:
                self.at(place)[block_hash] -= 1

    @rule(place=PLACES)
    def clear(self, place: Place) -> None:
        self.blocks.clear(place)
        self.model[place] = Counter()

    @rule(wanted=st.dictionaries(PLACES, COPIES))
    def replace(self, wanted: dict[Place, dict[int, int]]) -> None:
        self.blocks.replace(
            {
                place: (array(list(copies)), {h: n for h, n in copies.items() if n > 1})
                for place, copies in wanted.items()
            }
        )
        self.model = {place: Counter(copies) for place, copies in wanted.items()}

    @rule()
    def flush(self) -> None:
        for change in self.blocks.take_changes():
            held = self.flushed.setdefault(change.place, set())
            added, removed = set(change.added.tolist()), set(change.removed.tolist())
            assert not added & held and removed <= held and len(added) == len(change.added)
            held |= added
            held -= removed
        for place, block_hash, count in self.blocks.take_copies():
            self.flushed_copies[place, block_hash] = count
        assert {p: h for p, h in self.flushed.items() if h} == {
            place: set(+counts) for place, counts in self.model.items() if +counts
        }
        assert {key: n for key, n in self.flushed_copies.items() if n > 1} == {
            (place, block_hash): n for place, counts in self.model.items() for block_hash, n in counts.items() if n > 1
        }

    @invariant()
    def sums_are_the_models(self) -> None:
        assert self.blocks.sums() == {
            place: PlaceSum(len(+counts), sum(counts.values()), sum(+counts) % 2**64)
            for place, counts in self.model.items()
            if +counts
        }


TestResidency = Machine.TestCase
