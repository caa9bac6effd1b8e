# SPDX-License-Identifier: Apache-2.0
"""Evicts what was not used for longest.

Each operation is O(1), and a victim is, amortized: a key that is in use when it is passed over is set aside, out of the
order, until it can be evicted again, and then it is the youngest (it was in use a moment ago). So each add and each
return pays for being passed over once, however many keys are pinned, and the order of all others is that of their last
use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvrouter.engine_patch.offload.key import OffloadKey


class LruPolicy:
    """The interface is policy.Policy. capacity: in chunks; not needed here, for the tier knows when it is full."""

    def __init__(self, capacity: int) -> None:
        # Oldest first.
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()
        self._aside: set[OffloadKey] = set()

    def add(self, key: OffloadKey) -> None:
        self._order[key] = None

    def touch(self, key: OffloadKey) -> None:
        # One that is aside becomes the youngest anyway.
        if key in self._order:
            self._order.move_to_end(key)

    def discard(self, key: OffloadKey) -> None:
        self._order.pop(key, None)
        self._aside.discard(key)

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        order = self._order
        found, passed = oldest(order, count, may_evict)
        if len(found) < count:
            return None
        for key in passed:
            del order[key]
        self._aside.update(passed)
        for key in found:
            del order[key]
        return found

    def evictable_again(self, key: OffloadKey) -> None:
        if key in self._aside:
            self._aside.remove(key)
            self._order[key] = None

    def clear(self) -> None:
        self._order.clear()
        self._aside.clear()

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)


def oldest(
    order: OrderedDict[OffloadKey, None], count: int, may_evict: Callable[[OffloadKey], bool]
) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """(the first keys that may be evicted, at most `count`; the keys passed over before the last of them). Changes
    nothing."""
    found: list[OffloadKey] = []
    passed: list[OffloadKey] = []
    if count < 1:
        return found, passed
    for key in order:
        if may_evict(key):
            found.append(key)
            if len(found) == count:
                break
        else:
            passed.append(key)
    return found, passed
