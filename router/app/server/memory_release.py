# SPDX-License-Identifier: Apache-2.0
"""Gives back to the system what malloc keeps free. After a replay of an engine's whole ring that is some 40 MiB, which
glibc keeps wherever something newer lies above."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from kvrouter.events.transport.flood_watch import STATM, resident_bytes

# A look reads one small file.
LOOK_S = 2.0
# The memory taken since the last release for which another is worth a walk over all free blocks, in which whoever
# allocates waits: 5 to 10 ms where it gives back 40 MiB, some 30 where 400.
MIN_RISE_BYTES = 16 * 1024**2
# The same, as a part of what was resident then: a large process has more to walk over.
MIN_RISE_PART = 0.1
# From look to look. What rises faster is in use.
STANDS_BYTES = 1024**2


class ReleaseRule:
    """Says when a release is worth its time: the resident memory rose, and rises no more. Pure."""

    def __init__(self) -> None:
        # The least since the last release, and at the last look.
        self._least_bytes: int | None = None
        self._last_bytes = 0

    def is_due(self, resident_bytes: int) -> bool:
        """At one look."""
        last_bytes, self._last_bytes = self._last_bytes, resident_bytes
        if self._least_bytes is None or resident_bytes < self._least_bytes:
            self._least_bytes = resident_bytes
        rise_bytes = max(MIN_RISE_BYTES, MIN_RISE_PART * self._least_bytes)
        return resident_bytes - self._least_bytes >= rise_bytes and resident_bytes - last_bytes < STANDS_BYTES

    def begin(self, resident_bytes: int) -> None:
        """A release left so much."""
        self._least_bytes = self._last_bytes = resident_bytes


def trim_function() -> Callable[[int], int] | None:
    """glibc's malloc_trim, which lets other Python threads run; None with another libc, or without /proc."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim if STATM.exists() else None


async def release_memory(trim: Callable[[int], int]) -> None:
    """Looks and releases for ever."""
    rule = ReleaseRule()
    while True:
        await asyncio.sleep(LOOK_S)
        if rule.is_due(resident_bytes()):
            await asyncio.to_thread(trim, 0)
            rule.begin(resident_bytes())
