# SPDX-License-Identifier: Apache-2.0
"""The share of time in which the workers of a model compute prompts, measured at each choice. Pure."""

from __future__ import annotations

from math import exp

# The time over which the share is averaged: long enough for some prompts of a busy fleet, and short beside the daily
# change of load.
SPAN_S = 20.0
# Limited below 1, because the queueing term divides by the share of time that is left.
BUSY_MAX = 0.9
# In a burst the mean lags behind. The share of workers that compute right now counts at once up to this limit, at which
# the queueing term has its plain weight.
BUSY_NOW_MAX = 0.5


class BusyShare:
    """An exponential mean over SPAN_S of the share of computing workers; 0 before the second choice."""

    __slots__ = ("_mean", "_seen_s")

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen_s: float | None = None

    def observe(self, share: float, now: float) -> None:
        """Add the current share of workers that compute a prompt."""
        if self._seen_s is not None:
            self._mean += (share - self._mean) * (1 - exp((self._seen_s - now) / SPAN_S))
        self._seen_s = now

    def at_least(self, share: float) -> float:
        """Return the mean share or `share`, the current one, if it is larger, within BUSY_MAX and BUSY_NOW_MAX."""
        return min(BUSY_MAX, max(self._mean, min(BUSY_NOW_MAX, share)))
