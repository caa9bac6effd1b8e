# SPDX-License-Identifier: Apache-2.0
"""A log of records that are damaged or failed to be read or written: the first at once, then a count once a minute.

No I/O of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.engine_patch.setup.throttled_log import INTERVAL_S

DROPPED = "nothing of it was loaded, the record was dropped, and what it held is computed again"
NOT_WRITTEN = "what it was to hold is not on disk"


class IncidentLog:
    """The incidents of one folder.

    Call `tick` from time to time, so that the last incidents are logged too.
    """

    def __init__(self, where: str, log: logging.Logger, clock: Callable[[], float]) -> None:
        """Start without incidents; `where` is the folder for the log, and `clock` returns monotonic seconds."""
        self._where = where
        self._log = log
        self._clock = clock
        self._total = 0
        self._unlogged = 0
        # The last incident that is not logged yet.
        self._last = ""
        self._next_s = float("-inf")

    def found_at_start(self, records: int) -> None:
        """Log the number of invalid records that an earlier engine left."""
        if records:
            self._total += records
            self._log.warning(
                "kvrouter: disk tier %s: %d records of an earlier engine are damaged or incomplete: they were dropped, and what "
                "they held is computed again",
                self._where,
                records,
            )

    def found(self, reason: str, effect: str) -> None:
        """Count one record that is not as it should be.

        Args:
            reason: The fault.
            effect: The action taken, and its meaning for users.
        """
        self._total += 1
        self._unlogged += 1
        self._last = f"{reason}: {effect}"
        self.tick()

    def tick(self) -> None:
        """Log the incidents since the last line, if there are any and a minute has passed."""
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
