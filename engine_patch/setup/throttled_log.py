# SPDX-License-Identifier: Apache-2.0
"""A log for warnings that could occur at every engine step: once a minute for each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable

INTERVAL_S = 60.0

# Kinds are names of places and exception types, so only a fault could produce this many.
MAX_KINDS = 64


class ThrottledLog:
    """A log that writes at most one warning of each kind a minute, and with the next one how many were left out.

    The facts of a warning are part of its text, because vLLM's formatter shows nothing else.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        """Start with no kind of warning logged yet; `clock` returns monotonic seconds."""
        self._log = log
        self._clock = clock
        # Kind -> (when it was last logged, how many warnings were not logged since).
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, **facts: object) -> None:
        """Log the message with its facts, unless one of this kind was logged within the last minute."""
        now = self._clock()
        logged_s, unlogged = self._kinds.get(kind, (None, 0))
        if logged_s is not None and now - logged_s < INTERVAL_S:
            self._kinds[kind] = (logged_s, unlogged + 1)
            return
        if logged_s is None and len(self._kinds) >= MAX_KINDS:
            return
        self._kinds[kind] = (now, 0)
        details = ", ".join(f"{name}: {value}" for name, value in facts.items())
        self._log.warning(
            "kvrouter: %s%s%s",
            message,
            f" ({details})" if details else "",
            f"; {unlogged} more of this kind were not logged" if unlogged else "",
        )
