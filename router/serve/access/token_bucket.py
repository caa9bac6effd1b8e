# SPDX-License-Identifier: Apache-2.0
"""A token bucket: it admits a burst at once, then a steady rate. Pure."""

from __future__ import annotations


class TokenBucket:
    """A bucket that holds at most `burst` tokens and regains `rate_per_s` tokens each second.

    Times are in seconds of any clock that does not go back.
    """

    __slots__ = ("_at_s", "_burst", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = self._tokens = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one token and return 0.0, or return the seconds until there is one without taking any."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
        self._at_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate_per_s
