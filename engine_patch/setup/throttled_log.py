# SPDX-License-Identifier: Apache-2.0
"""Warnings that could occur at every engine step, logged once a minute for each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable

INTERVAL_S = 60.0

# Kinds are names of places and exception types; only a fault could produce this many.
MAX_KINDS = 64


class ThrottledLog:
    """`warning` logs the first of its kind, then how many more there were. Clock: seconds, monotonic.

    Facts are part of the text: vLLM's formatter shows nothing else."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        # Kind -> (when it was logged last, how many since).
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, **facts: object) -> None:
        """Logs unless one of this kind was logged within the last minute."""
        now = self._clock()
        said_s, unsaid = self._kinds.get(kind, (None, 0))
        if said_s is not None and now - said_s < INTERVAL_S:
            self._kinds[kind] = (said_s, unsaid + 1)
            return
        if said_s is None and len(self._kinds) >= MAX_KINDS:
            return
        self._kinds[kind] = (now, 0)
        known = ", ".join(f"{name}: {value}" for name, value in facts.items())
        self._log.warning(
            "kvrouter: %s%s%s",
            message,
            f" ({known})" if known else "",
            f"; {unsaid} more of this kind were not logged" if unsaid else "",
        )
