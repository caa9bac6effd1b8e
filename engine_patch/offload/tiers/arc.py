# SPDX-License-Identifier: Apache-2.0
"""ARC: evicts from the keys used once or from those used again, and learns which from keys that it evicted too early.

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4. T1 holds
the keys that were used once, T2 the keys that were used again, B1 and B2 (the ghosts) the keys last evicted from each,
all from oldest to youngest. The return of a ghost of B1 raises the target size p of T1, that of a ghost of B2 lowers
it.

Differences from the paper, which handles one request at a time and no keys in use:
- Several keys may come at once. The result is as if they came one after another, except that none of them makes room
  for the next.
- A key in use is passed over. If one list has no other key, the other list gives one. Passed-over keys are set aside,
  out of the order but counted in their list, until they can be evicted again, and are then the youngest of it: each is
  passed over once, as in lru.py.
- Room can be free after keys were discarded. Then nothing is evicted, but a ghost that comes still teaches.

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
    """The lengths of the four lists, and the target length of T1."""

    t1: int
    t2: int
    b1: int
    b2: int
    target: float


class ArcPolicy:
    """The ARC order of a tier's keys, as a `policy.Policy`."""

    def __init__(self, capacity: int) -> None:
        """Start empty; `capacity` is c of the paper, in chunks."""
        self._capacity = capacity
        self._t1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._t2: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()
        # Keys that were passed over, by the list to which they belong.
        self._aside_t1: set[OffloadKey] = set()
        self._aside_t2: set[OffloadKey] = set()
        # Ghosts for which `victims` made room and which `add` will put into T2.
        self._returning: set[OffloadKey] = set()
        # p of the paper: the size that T1 should have.
        self._target = 0.0

    @property
    def sizes(self) -> ArcSizes:
        """The present lengths of the lists, counting the keys set aside, and the target length of T1."""
        return ArcSizes(self._size_t1(), self._size_t2(), len(self._b1), len(self._b2), self._target)

    def add(self, key: OffloadKey) -> None:
        """Put an absent key into T1, or into T2 if it is a ghost."""
        if key in self._returning:
            # `victims` has already adapted the target for this returning ghost, and dropped the oldest ghosts.
            self._returning.remove(key)
            self._t2[key] = None
            return
        if self._learn(key):
            self._t2[key] = None
        else:
            self._t1[key] = None
        self._forget(0, 0)

    def touch(self, key: OffloadKey) -> None:
        """Move a used key to the young end of T2."""
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._t2:
            self._t2.move_to_end(key)
        elif key in self._aside_t1:
            self._aside_t1.remove(key)
            self._aside_t2.add(key)

    def discard(self, key: OffloadKey) -> None:
        """Remove a key without making it a ghost."""
        self._t1.pop(key, None)
        self._t2.pop(key, None)
        self._aside_t1.discard(key)
        self._aside_t2.discard(key)

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        """Evict `count` keys into the ghost lists and return them, or None if fewer can be evicted.

        The incoming keys teach before the choice, and their places in T1 and T2 count in it.
        """
        # Take up to `count` candidates from each list, because all choices below may fall on the same list.
        candidates_t1, passed_t1 = oldest(self._t1, count, may_evict)
        candidates_t2, passed_t2 = oldest(self._t2, count, may_evict)
        if len(candidates_t1) + len(candidates_t2) < count:
            return None
        _set_aside(self._t1, self._aside_t1, passed_t1)
        _set_aside(self._t2, self._aside_t2, passed_t2)
        used_once, used_again = deque(candidates_t1), deque(candidates_t2)
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
        """Put a key that was set aside at the young end of its list."""
        if key in self._aside_t1:
            self._aside_t1.remove(key)
            self._t1[key] = None
        elif key in self._aside_t2:
            self._aside_t2.remove(key)
            self._t2[key] = None

    def by_worth(self) -> list[OffloadKey]:
        """Return all keys: those used again, then those used once, the youngest of each first."""
        return [*self._aside_t2, *reversed(self._t2), *self._aside_t1, *reversed(self._t1)]

    def clear(self) -> None:
        """Forget all keys, ghosts and the target."""
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
        """Adapt the target if a ghost returns, and remove the ghost from its list.

        Returns:
            1 for a ghost of B1, 2 for one of B2, 0 for a key that is no ghost.
        """
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
        """Evict the oldest candidate of the list that REPLACE of the paper chooses, and return it.

        Args:
            used_once: Candidates of T1, oldest first.
            used_again: Candidates of T2, oldest first.
            new: Number of keys that count in T1 but are not in it yet.
            returns_to_t2: Whether the eviction is for a ghost of B2.
        """
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
        """Drop the oldest ghosts beyond the bounds.

        Args:
            new: Number of keys that are not yet in T1.
            coming: Number of keys that are not yet in T1 or T2.
        """
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
