# SPDX-License-Identifier: Apache-2.0
"""Mirror, copy counts and net transitions against plain sets and counters, under random operations."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.common.ids import CPU, GPU, Place, WorkerKey
from kvrouter.router.ingest.copy_counts import CopyTable
from kvrouter.router.ingest.net_changes import NetChanges
from kvrouter.router.kvcache.hit_tables import BANK_BITS
from kvrouter.router.matching.mirror import Mirror, MirrorFull
from kvrouter.router.matching.mirror_table import MIN_CAPACITY

BUDGET_BYTES = 1 << 26


def hashes_of(draw: random.Random, most: int, span: int) -> np.ndarray:
    # Repeats and neighbours on purpose: they collide.
    return np.array([draw.randrange(span) for _ in range(draw.randrange(most))], np.uint64)


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32), span=st.sampled_from([40, 3000, 2**63]))
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
        known = mirror.worker(worker)
        assert known is not None
        records |= {(worker, known.places[place] // BANK_BITS, block_hash) for block_hash in held}
    assert mirror.entries == len(records)


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
    known = mirror.worker(worker)
    assert known is not None
    assert known.refused_blocks == 100_000
    mirror.begin_epoch(worker, "f")
    known = mirror.worker(worker)
    assert known is not None
    assert known.refused_blocks == 0


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), span=st.sampled_from([30, 2000, 2**63]))
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
    assert set(table.multiples().tolist()) == {block_hash for block_hash, count in model.items() if count >= 2}


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
