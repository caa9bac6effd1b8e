# SPDX-License-Identifier: Apache-2.0
"""The bound on how long a worker in doubt keeps its credit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrouter.router.model.workers.stream_state import PROVEN, StreamState


class CreditTimer:
    """The timer that ends the credit of one worker in doubt.

    Credit lasts for `credit_s` from the beginning of the doubt. A doubt that stops and returns while nothing confirmed
    the blocks in between keeps its first beginning.
    """

    def __init__(self, credit_s: float, clock: Callable[[], float]) -> None:
        """Begin without a doubt.

        Args:
            credit_s: How long a worker in doubt keeps its credit.
            clock: Returns the time in seconds, monotonic.
        """
        self._credit_s = credit_s
        self._clock = clock
        # The time since which nothing (an event, a heartbeat, a snapshot) has confirmed the shown blocks; None while
        # they are confirmed.
        self._doubted_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def observe(self, state: StreamState, ended: Callable[[], None]) -> bool:
        """Take a new state of the worker, and return whether its doubt has lasted for too long already.

        Args:
            state: The new state.
            ended: Called when its doubt has lasted for too long. Only a running timer refers to it.
        """
        if state in PROVEN:
            self._doubted_since_s = None
        self.stop()
        if state is not StreamState.SUSPECT:
            return False
        now_s = self._clock()
        if self._doubted_since_s is None:
            self._doubted_since_s = now_s
        left_s = self._doubted_since_s + self._credit_s - now_s
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, ended)
        return left_s <= 0

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
