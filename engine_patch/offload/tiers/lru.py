# SPDX-License-Identifier: Apache-2.0
"""LRU: evicts the keys that were not used for longest.

Each operation is O(1), and so is each victim, amortized: a key that is in use when it is passed over is set aside, out
of the order, until it can be evicted again, and is then the youngest, because it was in use a moment ago. So each `add`
and each `evictable_again` pays for passing over a key once, however many keys are pinned, and the order of all other
keys is that of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvrouter.engine_patch.offload.key import OffloadKey


class LruPolicy:
    """The order of a tier's keys by last use, as a `policy.Policy`."""

    def __init__(self, capacity: int) -> None:
        """Start empty; `capacity`, in chunks, is not needed here, because the tier knows when it is full."""
        # Oldest first.
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()
        # Keys that were passed over and cannot be evicted yet.
        self._aside: set[OffloadKey] = set()

    def add(self, key: OffloadKey) -> None:
        """Add an absent key as the youngest."""
        self._order[key] = None

    def touch(self, key: OffloadKey) -> None:
        """Make a used key the youngest."""
        # A key that is set aside is not in the order. It becomes the youngest anyway when it can be evicted again.
        if key in self._order:
            self._order.move_to_end(key)

    def discard(self, key: OffloadKey) -> None:
        """Remove a key."""
        self._order.pop(key, None)
        self._aside.discard(key)

    def victims(
        self, count: int, may_evict: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        """Remove and return the `count` oldest keys that may be evicted, or None if there are fewer."""
        order = self._order
        victims, passed = oldest(order, count, may_evict)
        if len(victims) < count:
            return None
        for key in passed:
            del order[key]
        self._aside.update(passed)
        for key in victims:
            del order[key]
        return victims

    def evictable_again(self, key: OffloadKey) -> None:
        """Put a key that was set aside back into the order, as the youngest."""
        if key in self._aside:
            self._aside.remove(key)
            self._order[key] = None

    def by_worth(self) -> list[OffloadKey]:
        """Return all keys, the youngest first."""
        return [*self._aside, *reversed(self._order)]

    def clear(self) -> None:
        """Forget all keys."""
        self._order.clear()
        self._aside.clear()

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)


def oldest(
    order: OrderedDict[OffloadKey, None], count: int, may_evict: Callable[[OffloadKey], bool]
) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """Find the oldest keys that may be evicted, and change nothing.

    Returns:
        (the first keys that may be evicted, at most `count`; the keys that were passed over before the last of them)
    """
    evictable: list[OffloadKey] = []
    passed: list[OffloadKey] = []
    if count < 1:
        return evictable, passed
    for key in order:
        if may_evict(key):
            evictable.append(key)
            if len(evictable) == count:
                break
        else:
            passed.append(key)
    return evictable, passed
