# SPDX-License-Identifier: Apache-2.0
"""Logs records that are damaged or could not be read or written: the first at once, later ones once a minute with their
number. No I/O of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.engine_patch.setup.throttled_log import INTERVAL_S

DROPPED = "nothing of it was loaded, the record was dropped, and what it held is computed again"
NOT_WRITTEN = "what it was to hold is not on disk"


class IncidentLog:
    """The incidents of one folder. `tick` now and then, so that the last ones are logged too. Clock: seconds,
    monotonic."""

    def __init__(self, where: str, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._where = where
        self._log = log
        self._clock = clock
        self._total = 0
        self._unlogged = 0
        # The last incident that is not logged yet.
        self._last = ""
        self._next_s = float("-inf")

    def found_at_start(self, records: int) -> None:
        """Invalid records that an earlier engine left."""
        if records:
            self._total += records
            self._log.warning(
                "kvrouter: disk tier %s: %d records of an earlier engine are damaged or incomplete: they were dropped, and what "
                "they held is computed again",
                self._where,
                records,
            )

    def found(self, reason: str, effect: str) -> None:
        """One record is not what it should be. effect: what was done, and what that means."""
        self._total += 1
        self._unlogged += 1
        self._last = f"{reason}: {effect}"
        self.tick()

    def tick(self) -> None:
        now = self._clock()
        if not self._unlogged or now < self._next_s:
            return
        more = f"; {self._unlogged - 1} more since the last line" if self._unlogged > 1 else ""
        self._log.warning(
            "kvrouter: disk tier %s: %s%s; %d such records since the start: check this disk",
            self._where,
            self._last,
            more,
            self._total,
        )
        self._unlogged = 0
        self._next_s = now + INTERVAL_S
