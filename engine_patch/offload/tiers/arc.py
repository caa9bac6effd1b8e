# SPDX-License-Identifier: Apache-2.0
"""ARC: evicts from the keys used once or from those used again, and learns which from what it evicted too early.

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4. T1 holds
what was used once, T2 what was used again, B1 and B2 (the ghosts) the keys last evicted from each, all from oldest to
youngest. The return of a ghost of B1 raises the target size p of T1, that of a ghost of B2 lowers it.

What differs from the paper, which knows one request at a time and nothing in use:
- Several keys may come at once. It is as if they came one after another, but that none of them makes room for the next.
- A key in use is passed over. Where one list has nothing else, the other gives. Passed-over keys are set aside, out of the order
  but counted in their list, until they can be evicted again, and then are the youngest of it: each is passed over once,
  as in lru.py.
- Room can be free, where keys were discarded: then nothing is evicted, but a ghost that comes still teaches.

Invariants, at the end of each call, while at most c keys are resident: |T1| + |B1| <= c, all four <= 2c, 0 <= p <= c.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.lru import oldest


@dataclass(frozen=True, slots=True)
class ArcSizes:
    """Lengths of the four lists, and the target length of T1."""

    t1: int
    t2: int
    b1: int
    b2: int
    target: float


class ArcPolicy:
    """The interface is policy.Policy. capacity: c of the paper, in chunks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._t1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._t2: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()
        # What was passed over: which key belongs to which list.
        self._aside_t1: set[OffloadKey] = set()
        self._aside_t2: set[OffloadKey] = set()
        # Ghosts for which `victims` made room: `add` brings them into T2.
        self._returning: set[OffloadKey] = set()
        # p of the paper: the size that T1 should have.
        self._target = 0.0

    @property
    def sizes(self) -> ArcSizes:
        return ArcSizes(self._size_t1(), self._size_t2(), len(self._b1), len(self._b2), self._target)

    def add(self, key: OffloadKey) -> None:
        if key in self._returning:
            # `victims` has learned and forgotten already.
            self._returning.remove(key)
            self._t2[key] = None
            return
        if self._learn(key):
            self._t2[key] = None
        else:
            self._t1[key] = None
        self._forget(0, 0)

    def touch(self, key: OffloadKey) -> None:
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._t2:
            self._t2.move_to_end(key)
        elif key in self._aside_t1:
            self._aside_t1.remove(key)
            self._aside_t2.add(key)

    def discard(self, key: OffloadKey) -> None:
        self._t1.pop(key, None)
        self._t2.pop(key, None)
        self._aside_t1.discard(key)
        self._aside_t2.discard(key)

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        # Enough of each list for every course that the choice below can take.
        first, passed_t1 = oldest(self._t1, count, may_evict)
        again, passed_t2 = oldest(self._t2, count, may_evict)
        if len(first) + len(again) < count:
            return None
        _set_aside(self._t1, self._aside_t1, passed_t1)
        _set_aside(self._t2, self._aside_t2, passed_t2)
        used_once, used_again = deque(first), deque(again)
        evicted = [self._replace(used_once, used_again, 0, False) for _ in range(count - len(incoming))]
        room = len(incoming) - count
        new = 0
        for number, key in enumerate(incoming):
            ghost = self._learn(key)
            if number >= room:
                evicted.append(self._replace(used_once, used_again, new, ghost == 2))
            if ghost:
                self._returning.add(key)
            else:
                new += 1
            self._forget(new, number + 1)
        return evicted

    def evictable_again(self, key: OffloadKey) -> None:
        if key in self._aside_t1:
            self._aside_t1.remove(key)
            self._t1[key] = None
        elif key in self._aside_t2:
            self._aside_t2.remove(key)
            self._t2[key] = None

    def clear(self) -> None:
        for keys in (self._t1, self._t2, self._b1, self._b2, self._aside_t1, self._aside_t2, self._returning):
            keys.clear()
        self._target = 0.0

    def __len__(self) -> int:
        return self._size_t1() + self._size_t2()

    def _size_t1(self) -> int:
        return len(self._t1) + len(self._aside_t1)

    def _size_t2(self) -> int:
        return len(self._t2) + len(self._aside_t2)

    def _learn(self, key: OffloadKey) -> int:
        """Adapts the target where a ghost comes back, and takes it from its list: 1 for B1, 2 for B2, 0 for no
        ghost."""
        if key in self._b1:
            self._target = min(self._target + max(len(self._b2) / len(self._b1), 1.0), float(self._capacity))
            del self._b1[key]
            return 1
        if key in self._b2:
            self._target = max(self._target - max(len(self._b1) / len(self._b2), 1.0), 0.0)
            del self._b2[key]
            return 2
        return 0

    def _replace(
        self, used_once: deque[OffloadKey], used_again: deque[OffloadKey], new: int, returns_to_t2: bool
    ) -> OffloadKey:
        """REPLACE of the paper, among the candidates. new: keys that have their place in T1, but are not in it yet."""
        size = self._size_t1() + new
        from_t1 = size > self._target or (returns_to_t2 and size == self._target)
        if used_once and (from_t1 or not used_again):
            key = used_once.popleft()
            del self._t1[key]
            self._b1[key] = None
        else:
            key = used_again.popleft()
            del self._t2[key]
            self._b2[key] = None
        return key

    def _forget(self, new: int, coming: int) -> None:
        """Drops the oldest ghosts beyond the bounds. new, coming: keys not yet in T1, and not yet in T1 or T2."""
        size_t1 = self._size_t1()
        while self._b1 and size_t1 + new + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        resident = size_t1 + self._size_t2() + coming
        while self._b2 and resident + len(self._b1) + len(self._b2) > 2 * self._capacity:
            self._b2.popitem(last=False)


def _set_aside(order: OrderedDict[OffloadKey, None], aside: set[OffloadKey], keys: list[OffloadKey]) -> None:
    for key in keys:
        del order[key]
    aside.update(keys)
