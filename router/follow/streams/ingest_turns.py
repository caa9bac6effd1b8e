# SPDX-License-Identifier: Apache-2.0
"""The bound on the time that all streams of one router together take before everything else gets its turn."""

from __future__ import annotations

import asyncio
from collections import deque

# The bound in one pass of the event loop. Answers wait at most this long plus one stream's own turn, however many
# workers have news at once.
PASS_S = 0.004


class IngestTurns:
    """The turns of all streams on one event loop.

    A stream waits for its turn, applies items, and reports how long that took.
    """

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._resets = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until this pass of the event loop has time left for a turn. Callers get their turns in the order of the calls."""
        while self._waiting or self._spent_s >= PASS_S:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
                return
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise

    def spend(self, took_s: float) -> None:
        """Report that a turn took this many seconds."""
        self._spent_s += took_s
        if self._spent_s < PASS_S:
            self._wake()
        elif not self._resets:
            self._resets = True
            asyncio.get_running_loop().call_soon(self._reset)

    def _reset(self) -> None:
        self._resets, self._spent_s = False, 0.0
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
