# SPDX-License-Identifier: Apache-2.0
"""Mirror, copy counts and net transitions against plain sets and counters, under random operations."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common import open_addressing
from kvrouter.router.base.common.ids import CPU, GPU, Place, WorkerKey
from kvrouter.router.index.ingest.copy_counts import CopyTable
from kvrouter.router.index.ingest.net_changes import NetChanges
from kvrouter.router.index.matching.mirror import Mirror, MirrorFull
from kvrouter.router.index.matching.mirror_table import MIN_CAPACITY
from kvrouter.router.model.kvcache.hit_tables import BANK_BITS
from tests.support.examples import examples

BUDGET_BYTES = 1 << 26


# The span that stands for hashes whose places are all among the last of their table.
LAST_PLACES = 3001


def hashes_of(draw: random.Random, most: int, span: int) -> np.ndarray:
    # Repeats and neighbours are intended, because they collide.
    hashes = np.array([draw.randrange(span) for _ in range(draw.randrange(most))], np.uint64)
    return open_addressing.hashes_of(~hashes) if span == LAST_PLACES else hashes


@settings(max_examples=examples(100))
@given(hashes=st.lists(st.integers(0, 2**64 - 1)))
def test_a_hash_is_had_again_from_its_key(hashes: list[int]) -> None:
    keys = np.empty(len(hashes), np.uint64)
    open_addressing.spread(np.array(hashes, np.uint64), keys)
    assert open_addressing.hashes_of(keys).tolist() == hashes
    assert (keys == 0).tolist() == [block_hash == 0 for block_hash in hashes]


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32), span=st.sampled_from([40, 3000, LAST_PLACES, 2**63]))
def test_mirror_equals_sets(seed: int, span: int) -> None:
    draw = random.Random(seed)
    workers = [WorkerKey("m", f"w{i}") for i in range(3)]
    places = [Place(g, medium) for g in range(BANK_BITS // 2 + 2) for medium in (GPU, CPU)]
    mirror = Mirror(BUDGET_BYTES)
    model: dict[tuple[WorkerKey, Place], set[int]] = {}
    for worker in workers:
        mirror.begin_epoch(worker, "e")
    for _ in range(300):
        worker, place = draw.choice(workers), draw.choice(places)
        hashes = hashes_of(draw, 60, span)
        held = model.setdefault((worker, place), set())
        action = draw.random()
        if action < 0.55:
            mirror.add(worker, place, hashes)
            held |= set(hashes.tolist())
        elif action < 0.95:
            mirror.discard(worker, place, hashes)
            held -= set(hashes.tolist())
        elif action < 0.97:
            mirror.begin_epoch(worker, str(draw.random()))
            for key in model:
                if key[0] == worker:
                    model[key].clear()
        else:
            mirror.sweep()
    for (worker, place), held in model.items():
        assert set(mirror.held(worker, place).tolist()) == held
    while mirror.sweep():
        pass
    records = set()
    for (worker, place), held in model.items():
        worker_slot = mirror.worker(worker)
        assert worker_slot is not None
        records |= {(worker, worker_slot.places[place] // BANK_BITS, block_hash) for block_hash in held}
    assert mirror.entries == len(records)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 2**32), count=st.sampled_from([40, 90, 300]))
def test_blocks_that_many_workers_hold_equal_sets(seed: int, count: int) -> None:
    """Turn lists into rows and back, replace workers, and sweep at any time."""
    draw = random.Random(seed)
    workers = [WorkerKey("m", f"w{i}") for i in range(count)]
    places = [Place(0, GPU), Place(1, GPU)]
    mirror = Mirror(BUDGET_BYTES)
    model: dict[WorkerKey, dict[Place, set[int]]] = {}
    had_rows = False
    # Most workers hold the blocks, then few, then most again.
    for share in (0.9, 0.1, 0.9, 0.02):
        for _ in range(4 * count):
            worker, place = draw.choice(workers), draw.choice(places)
            if worker not in model or draw.random() < 0.02:
                mirror.begin_epoch(worker, str(draw.random()))
                model[worker] = {place: set() for place in places}
            hashes = np.array([draw.randrange(30) for _ in range(20)], np.uint64)
            if draw.random() < share:
                mirror.add(worker, place, hashes)
                model[worker][place] |= set(hashes.tolist())
            else:
                mirror.discard(worker, place, hashes)
                model[worker][place] -= set(hashes.tolist())
            if draw.random() < 0.1:
                mirror.sweep()
            had_rows = had_rows or mirror.table.rows.cells_live > 0
        for worker, held in model.items():
            for place in places:
                assert set(mirror.held(worker, place).tolist()) == held[place]
        while mirror.sweep():
            pass
        assert mirror.entries == sum(len(held[places[0]] | held[places[1]]) for held in model.values())
    assert had_rows
    everything = np.arange(30, dtype=np.uint64)
    for worker, held in list(model.items())[5:]:
        for place in places:
            mirror.discard(worker, place, everything)
            held[place].clear()
    assert mirror.table.rows.cells_live == 0
    for worker, held in model.items():
        assert set(mirror.held(worker, places[0]).tolist()) == held[places[0]]
        mirror.forget(worker)
    while mirror.sweep():
        pass
    assert mirror.entries == mirror.table.slots.used == 0


def test_without_room_for_rows_blocks_have_lists() -> None:
    place, hashes = Place(0, GPU), np.arange(20, dtype=np.uint64)
    workers = [WorkerKey("m", f"w{i}") for i in range(150)]

    def grown(budget_bytes: int) -> Mirror:
        """Return a mirror with enough free records for all blocks that the test adds."""
        mirror = Mirror(budget_bytes)
        for worker in workers:
            mirror.begin_epoch(worker, "e")
        mirror.add(workers[0], place, np.arange(5000, dtype=np.uint64))
        mirror.discard(workers[0], place, np.arange(5000, dtype=np.uint64))
        return mirror

    mirror = grown(grown(BUDGET_BYTES).bytes)
    for worker in workers:
        mirror.add(worker, place, hashes)
    assert mirror.table.rows.missed and not mirror.table.rows.cells_live
    assert all(len(mirror.held(worker, place)) == 20 for worker in workers)


@pytest.mark.parametrize("has_spare_records", [True, False])
def test_rows_of_blocks_that_are_gone_are_used_again(has_spare_records: bool) -> None:
    """Empty rows with and without spare records: with them, a row becomes a list before it is empty."""
    mirror, place = Mirror(BUDGET_BYTES), Place(0, GPU)
    workers = [WorkerKey("m", f"w{i}") for i in range(150)]
    for worker in workers:
        mirror.begin_epoch(worker, "e")
    rows = []
    for turn in range(8):
        hashes = np.arange(20, dtype=np.uint64) + np.uint64(1_000 * turn)
        for worker in workers:
            mirror.add(worker, place, hashes)
        assert mirror.table.rows.cells_live
        rows.append(mirror.table.rows.capacity())
        spare = 0 if has_spare_records else mirror.table.record_capacity() - mirror.table.records_live
        others = np.arange(spare, dtype=np.uint64) + np.uint64(10**6)
        mirror.add(workers[0], place, others)
        for worker in workers:
            mirror.discard(worker, place, hashes)
        mirror.discard(workers[0], place, others)
        assert not mirror.entries and not mirror.table.slots.used
    assert rows[1:] == rows[1:2] * 7


def test_the_room_of_removed_workers_is_used_again() -> None:
    mirror = Mirror(BUDGET_BYTES)
    place = Place(0, GPU)
    shared, workers = np.arange(200, dtype=np.uint64), [WorkerKey("m", f"w{i}") for i in range(100)]
    bytes_then: set[int] = set()
    for life in range(4):
        for i, worker in enumerate(workers):
            mirror.begin_epoch(worker, str(life))
            mirror.add(worker, place, shared)
            mirror.add(worker, place, np.arange(300, dtype=np.uint64) + np.uint64(1000 * i + 200))
        bytes_then.add(mirror.bytes)
        for worker in workers:
            mirror.forget(worker)
        while mirror.sweep():
            pass
        assert mirror.entries == 0
    assert len(bytes_then) == 1


def test_a_dead_epoch_is_gone_at_once_and_its_memory_after_a_sweep() -> None:
    mirror = Mirror(BUDGET_BYTES)
    worker, place = WorkerKey("m", "w"), Place(0, GPU)
    mirror.begin_epoch(worker, "1")
    mirror.add(worker, place, np.arange(5000, dtype=np.uint64))
    mirror.begin_epoch(worker, "2")
    assert not len(mirror.held(worker, place))
    assert mirror.entries == 5000
    while mirror.sweep():
        pass
    assert mirror.entries == 0


def test_one_workers_removal_leaves_the_others_alone() -> None:
    mirror = Mirror(BUDGET_BYTES)
    first, second, place = WorkerKey("m", "a"), WorkerKey("m", "b"), Place(0, GPU)
    hashes = np.arange(10, dtype=np.uint64)
    for worker in (first, second):
        mirror.begin_epoch(worker, "e")
        mirror.add(worker, place, hashes)
    mirror.discard(first, place, hashes)
    assert set(mirror.held(second, place).tolist()) == set(range(10))


def test_a_full_mirror_refuses_and_keeps_what_it_has() -> None:
    mirror = Mirror(MIN_CAPACITY * 40)
    worker, place = WorkerKey("m", "w"), Place(0, GPU)
    mirror.begin_epoch(worker, "e")
    mirror.add(worker, place, np.arange(500, dtype=np.uint64))
    with pytest.raises(MirrorFull, match="mirror_budget_bytes"):
        mirror.add(worker, place, np.arange(100_000, dtype=np.uint64))
    assert len(mirror.held(worker, place)) == 500
    mirrored = mirror.worker(worker)
    assert mirrored is not None
    assert mirrored.refused_blocks == 100_000
    mirror.begin_epoch(worker, "f")
    mirrored = mirror.worker(worker)
    assert mirrored is not None
    assert mirrored.refused_blocks == 0


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), span=st.sampled_from([30, 2000, LAST_PLACES, 2**63]))
def test_copies_equal_a_counter_and_report_every_edge(seed: int, span: int) -> None:
    draw = random.Random(seed)
    table = CopyTable()
    model: Counter[int] = Counter()
    for _ in range(200):
        hashes = hashes_of(draw, 40, span)
        if draw.random() < 0.6:
            now = table.add_copies(hashes)
            for block_hash, count in zip(hashes.tolist(), now.tolist(), strict=True):
                model[block_hash] += 1
                assert count == model[block_hash]
        else:
            was = table.remove_copies(hashes)
            for block_hash, count in zip(hashes.tolist(), was.tolist(), strict=True):
                assert count == model[block_hash]
                model[block_hash] = max(0, model[block_hash] - 1)
    held = {block_hash for block_hash, count in model.items() if count}
    assert set(table.hashes().tolist()) == held and len(table) == len(held)
    assert table.copied() == {block_hash: count for block_hash, count in model.items() if count >= 2}
    assert set(table.multiples().tolist()) == set(table.copied())
    loaded = CopyTable()
    loaded.set(table.hashes(), np.ones(len(table), np.uint16))
    copied = table.copied()
    loaded.set(np.fromiter(copied, np.uint64), np.fromiter(copied.values(), np.uint16))
    assert set(loaded.hashes().tolist()) == held and loaded.copied() == copied


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32))
def test_net_transitions_carry_the_first_set_to_the_last(seed: int) -> None:
    draw = random.Random(seed)
    before = set(range(0, 20, 2))
    now = set(before)
    transitions = NetChanges()
    for _ in range(draw.randrange(12)):
        absent, present = sorted(set(range(20)) - now), sorted(now)
        if draw.random() < 0.5:
            chosen = draw.sample(absent, draw.randint(0, len(absent)))
            transitions.arrived(np.array(chosen, np.uint64))
            now |= set(chosen)
        else:
            chosen = draw.sample(present, draw.randint(0, len(present)))
            transitions.left(np.array(chosen, np.uint64))
            now -= set(chosen)
    added, removed = (part.tolist() for part in transitions.net())
    assert sorted(added) == sorted(now - before)
    assert sorted(removed) == sorted(before - now)
