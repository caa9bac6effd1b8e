# SPDX-License-Identifier: Apache-2.0
"""Returns memory that malloc keeps free to the system.

After a replay of an engine's whole ring that is some 40 MiB, which glibc keeps wherever something newer lies above.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from kvrouter.events.transport.flood_watch import STATM, resident_bytes
from kvrouter.router.base.common import ticks

# The interval of looks; a look reads one small file.
LOOK_S = 2.0
# The rise of resident memory since the last release that justifies another one. A release walks over all free blocks,
# and threads that allocate wait meanwhile: 5 to 10 ms if it returns 40 MiB, some 30 ms for 400 MiB.
MIN_RISE_BYTES = 16 * 1024**2
# The same rise as a share of the memory that was resident then, because a large process has more blocks to walk over.
MIN_RISE_PART = 0.1
# The rise from one look to the next below which memory counts as stable. Memory that rises faster is in use.
STANDS_BYTES = 1024**2


class ReleaseRule:
    """The rule for when a release is worth its time: resident memory has risen and rises no longer. Pure."""

    def __init__(self) -> None:
        # The least resident memory since the last release, and the resident memory at the last look.
        self._least_bytes: int | None = None
        self._last_bytes = 0

    def is_due(self, resident_bytes: int) -> bool:
        """Return whether a release is due at this look, given the resident memory."""
        last_bytes, self._last_bytes = self._last_bytes, resident_bytes
        if self._least_bytes is None or resident_bytes < self._least_bytes:
            self._least_bytes = resident_bytes
        rise_bytes = max(MIN_RISE_BYTES, MIN_RISE_PART * self._least_bytes)
        return resident_bytes - self._least_bytes >= rise_bytes and resident_bytes - last_bytes < STANDS_BYTES

    def begin(self, resident_bytes: int) -> None:
        """Start over after a release, given the resident memory that it left."""
        self._least_bytes = self._last_bytes = resident_bytes


def trim_function() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, which lets other Python threads run; None with another libc or without /proc."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim if STATM.exists() else None


async def release_memory(trim: Callable[[int], int]) -> None:
    """Look at the resident memory forever, and release memory whenever it is due."""
    rule = ReleaseRule()
    while True:
        await ticks.sleep(LOOK_S)
        if rule.is_due(resident_bytes()):
            await asyncio.to_thread(trim, 0)
            rule.begin(resident_bytes())
