# SPDX-License-Identifier: Apache-2.0
"""A bound on the replays and snapshots that one process runs at once, for when a whole fleet reconnects.

Waiting requests are granted in random order: no worker is always last, and several routers that lost the same fleet do
not query its engines in step. A `Permits` belongs to one asyncio loop; it sends and receives nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

# A ring of 10,000 batches or a snapshot of 200,000 blocks takes some 20 MB and a tenth of a second of this process.
# With more at once, each of them only takes longer, and the messages held meanwhile pile up.
DEFAULT_AT_ONCE = 4
# A transfer that takes longer is slow at the other end and costs little here: an endpoint that never answers must not
# delay the others.
DEFAULT_LONGEST_S = 1.0


class Permits:
    """The permits of one process. Call `request` for each transfer, and `Permit.end` when its answer is complete."""

    def __init__(self, *, rng: Random, at_once: int = DEFAULT_AT_ONCE, longest_s: float = DEFAULT_LONGEST_S) -> None:
        """Create permits for `at_once` transfers.

        Args:
            rng: Chooses the request that is granted next.
            at_once: How many permits are granted at a time.
            longest_s: The time after which a permit no longer counts, though its transfer may continue.
        """
        self._rng = rng
        self._at_once = at_once
        self._longest_s = longest_s
        self._taken: dict[Permit, asyncio.TimerHandle] = {}
        self._waiting: list[Permit] = []

    @property
    def waiting(self) -> int:
        """Number of permits that were requested and not granted yet."""
        return len(self._waiting)

    def request(self, wake: Callable[[], None]) -> Permit:
        """Return a permit, granted at once if there is room; otherwise `wake` is called when it is granted."""
        permit = Permit(self, wake)
        if len(self._taken) < self._at_once:
            self._grant(permit)
        else:
            self._waiting.append(permit)
        return permit

    def give_back(self, permit: Permit) -> None:
        """Take a permit back. Safe to call twice, and for a permit that was never granted."""
        if (timer := self._taken.pop(permit, None)) is not None:
            timer.cancel()
            self._fill()
        elif permit in self._waiting:
            self._waiting.remove(permit)

    def _grant(self, permit: Permit) -> None:
        permit.granted = True
        self._taken[permit] = asyncio.get_running_loop().call_later(self._longest_s, self.give_back, permit)

    def _fill(self) -> None:
        while self._waiting and len(self._taken) < self._at_once:
            permit = self._waiting.pop(self._rng.randrange(len(self._waiting)))
            self._grant(permit)
            permit.wake()


class Permit:
    """A permit for one replay or snapshot."""

    __slots__ = ("_permits", "granted", "wake")

    def __init__(self, permits: Permits, wake: Callable[[], None]) -> None:
        self._permits = permits
        self.wake = wake
        self.granted = False

    def end(self) -> None:
        """Give the permit back, or give up waiting for it if it is not granted yet. Safe to call twice."""
        self._permits.give_back(self)
