# SPDX-License-Identifier: Apache-2.0
"""The time that the streams of one router may take together before everything else gets its turn."""

from __future__ import annotations

import asyncio
from collections import deque

# Of one pass of the event loop. Answers wait for no longer than this and one stream's own turn, however many workers
# have news at once.
PASS_S = 0.004


class IngestTurns:
    """Belongs to one event loop. A stream waits for its turn, takes items in, and says how long that took."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._resets = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Until there is time left, in the order of asking."""
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
