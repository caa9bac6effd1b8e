# SPDX-License-Identifier: Apache-2.0
"""ARC compared with the pseudocode of its paper, line by line, and its laws for keys that are in use."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.arc import ArcPolicy, ArcSizes

# Kinds of traces: uniform, skewed, and scans through more keys than fit, between a few keys that come again and again.
KINDS = ("uniform", "skewed", "scans")


class Paper:
    """ARC(c) of Megiddo and Modha, FAST 2003, figure 4.

    Lists run from LRU to MRU, and pages are numbers.
    """

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # case II
            delta = 1.0 if len(b1) >= len(b2) else len(b2) / len(b1)
            self.p = min(self.p + delta, float(c))
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            delta = 1.0 if len(b2) >= len(b1) else len(b1) / len(b2)
            self.p = max(self.p - delta, 0.0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                self.replace(x)
            t1.append(x)

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    @property
    def resident(self) -> set[int]:
        return {*self.t1, *self.t2}

    @property
    def sizes(self) -> ArcSizes:
        return ArcSizes(len(self.t1), len(self.t2), len(self.b1), len(self.b2), self.p)


def key(number: int) -> OffloadKey:
    return pack(number.to_bytes(8, "big"), 0)


class Cache:
    """Cache that sends requests through the policy as a tier does: all hits, or several misses at once.

    Keys in `in_use` are never evicted.
    """

    def __init__(self, c: int) -> None:
        self.c = c
        self.policy = ArcPolicy(c)
        self.resident: set[int] = set()
        self.in_use: set[int] = set()
        self.evictions = 0

    def request(self, *numbers: int) -> None:
        for x in numbers:
            if x in self.resident:
                self.policy.touch(key(x))
        new = [x for x in numbers if x not in self.resident]
        missing = len(self.resident) + len(new) - self.c
        if missing > 0:
            victims = self.policy.victims(missing, self.may_evict, [key(x) for x in new])
            assert victims is not None
            evicted = {int.from_bytes(victim[:8], "big") for victim in victims}
            assert len(victims) == missing == len(evicted)
            assert evicted <= self.resident - self.in_use
            self.resident -= evicted
            self.evictions += missing
        for x in new:
            self.policy.add(key(x))
            self.policy.evictable_again(key(x))
        self.resident.update(new)

    def may_evict(self, one: OffloadKey) -> bool:
        return int.from_bytes(one[:8], "big") not in self.in_use

    def check(self) -> None:
        sizes, c = self.policy.sizes, self.c
        assert sizes.t1 + sizes.t2 == len(self.policy) == len(self.resident) <= c
        assert sizes.t1 + sizes.b1 <= c
        assert sizes.t1 + sizes.t2 + sizes.b1 + sizes.b2 <= 2 * c
        assert 0 <= sizes.target <= c


def trace(kind: str, c: int, length: int, rng: random.Random) -> list[int]:
    if kind == "uniform":
        return [rng.randrange(2 * c + 2) for _ in range(length)]
    if kind == "skewed":
        return [int(rng.paretovariate(0.7)) % (5 * c) for _ in range(length)]
    pages: list[int] = []
    while len(pages) < length:
        start = rng.randrange(10 * c)
        pages += range(start, start + rng.randrange(1, 2 * c + 2))
        pages += [20 * c + rng.randrange(max(1, c // 2)) for _ in range(rng.randrange(2 * c))]
    return pages[:length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("c", [1, 2, 3, 8, 21])
def test_one_request_at_a_time_equals_the_paper(kind: str, c: int) -> None:
    for seed in range(6):
        paper, cache = Paper(c), Cache(c)
        for x in trace(kind, c, 600, random.Random(f"{kind} {c} {seed}")):
            paper.request(x)
            cache.request(x)
            assert (cache.resident, cache.policy.sizes) == (paper.resident, paper.sizes)
            cache.check()
        assert cache.evictions > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_keys_one_after_another(kind: str) -> None:
    """Leave out the batches in which the paper would evict one key of the batch for the next."""
    compared = 0
    for seed in range(12):
        rng = random.Random(f"batch {kind} {seed}")
        c = rng.randrange(4, 24)
        paper, cache = Paper(c), Cache(c)
        pages = iter(trace(kind, c, 1_000, rng))
        while batch := list(dict.fromkeys(x for x, _ in zip(pages, range(rng.randrange(1, c // 2 + 1)), strict=False))):
            hits = [x for x in batch if x in paper.resident]
            misses = [x for x in batch if x not in paper.resident]
            paper_after = copy.deepcopy(paper)
            for x in hits + misses:
                paper_after.request(x)
            if not paper_after.resident >= set(misses):
                continue
            cache.request(*hits, *misses)
            paper = paper_after
            assert (cache.resident, cache.policy.sizes) == (paper.resident, paper.sizes)
            compared += len(misses) > 1
    assert compared > 100


@pytest.mark.parametrize("kind", KINDS)
def test_invariants_hold_with_keys_in_use_discards_and_clears(kind: str) -> None:
    evictions = 0
    for seed in range(20):
        rng = random.Random(f"pins {kind} {seed}")
        c = rng.randrange(2, 20)
        cache = Cache(c)
        for x in trace(kind, c, 400, rng):
            if cache.in_use and rng.random() < 0.4:
                freed = rng.choice(sorted(cache.in_use))
                cache.in_use.remove(freed)
                cache.policy.evictable_again(key(freed))
            if len(cache.in_use) < c - 1 and cache.resident and rng.random() < 0.4:
                cache.in_use.add(rng.choice(sorted(cache.resident)))
            evictable = sorted(cache.resident - cache.in_use)
            if evictable and rng.random() < 0.1:
                cache.resident.remove(evictable[0])
                cache.policy.discard(key(evictable[0]))
            cache.request(x)
            cache.check()
        evictions += cache.evictions
        cache.policy.clear()
        assert cache.policy.sizes == ArcSizes(0, 0, 0, 0, 0.0)
    assert evictions > 500


def filled(c: int, once: Sequence[int], again: Sequence[int]) -> Cache:
    cache = Cache(c)
    for x in (*again, *again, *once):
        cache.request(x)
    return cache


def test_ghosts_move_the_target_both_ways() -> None:
    cache = filled(4, once=(3, 4), again=(1, 2))
    cache.request(5)
    assert cache.policy.sizes == ArcSizes(t1=2, t2=2, b1=1, b2=0, target=0.0)
    cache.request(3)
    assert cache.policy.sizes == ArcSizes(t1=1, t2=3, b1=1, b2=0, target=1.0)
    cache.request(6)
    assert cache.policy.sizes == ArcSizes(t1=2, t2=2, b1=1, b2=1, target=1.0)
    cache.request(1)
    assert cache.policy.sizes == ArcSizes(t1=1, t2=3, b1=2, b2=0, target=0.0)


def test_a_scan_does_not_evict_repeatedly_used_keys() -> None:
    cache = filled(8, once=(), again=(1, 2, 3, 4))
    cache.request(*range(100, 104))
    for x in range(200, 300, 2):
        cache.request(x, x + 1)
    assert {1, 2, 3, 4} <= cache.resident


def test_the_other_list_gives_victims_where_one_is_in_use() -> None:
    # The target is 0, so T1 would give a key.
    cache = filled(4, once=(3, 4), again=(1, 2))
    cache.in_use = {3, 4}
    cache.request(5)
    assert cache.resident == {2, 3, 4, 5}
    assert cache.policy.sizes == ArcSizes(t1=3, t2=1, b1=0, b2=1, target=0.0)


def test_a_refused_batch_teaches_nothing() -> None:
    cache = filled(4, once=(3, 4), again=(1, 2))
    cache.request(5)
    before = cache.policy.sizes
    cache.in_use = {1, 2, 4}
    assert cache.policy.victims(2, cache.may_evict, [key(3), key(9)]) is None
    assert cache.policy.sizes == before
    cache.in_use = set()
    # Key 4 was not set aside either, so it is still the oldest.
    assert cache.policy.victims(1, cache.may_evict, [key(9)]) == [key(4)]


def test_a_key_in_use_that_is_used_again_is_in_t2_when_it_returns() -> None:
    cache = filled(4, once=(3, 4), again=(1, 2))
    cache.in_use = {3}
    cache.request(5)
    cache.policy.touch(key(3))
    assert cache.policy.sizes == ArcSizes(t1=1, t2=3, b1=1, b2=0, target=0.0)
    cache.in_use = set()
    cache.policy.evictable_again(key(3))
    assert cache.policy.victims(4, cache.may_evict) == [key(5), key(1), key(2), key(3)]


def test_a_ghost_that_finds_room_moves_the_target() -> None:
    cache = filled(4, once=(3, 4), again=(1, 2))
    cache.request(5)
    cache.resident.remove(4)
    cache.policy.discard(key(4))
    cache.request(3)
    assert cache.policy.sizes == ArcSizes(t1=1, t2=3, b1=0, b2=0, target=1.0)


def test_keys_that_find_room_come_before_those_that_evict() -> None:
    cache = filled(4, once=(3, 4), again=(1, 2))
    cache.request(5)
    cache.request(3)
    assert cache.policy.sizes == ArcSizes(t1=1, t2=3, b1=1, b2=0, target=1.0)
    cache.resident.remove(2)
    cache.policy.discard(key(2))
    # Key 8 fits, and T1 has one key too many when 9 comes.
    cache.request(8, 9)
    assert cache.resident == {1, 3, 8, 9}


def test_a_discarded_key_leaves_no_ghost() -> None:
    cache = filled(4, once=(3, 4), again=(1, 2))
    for x in (3, 1):
        cache.resident.remove(x)
        cache.policy.discard(key(x))
    cache.request(3, 1)
    assert cache.policy.sizes == ArcSizes(t1=3, t2=1, b1=0, b2=0, target=0.0)
