# SPDX-License-Identifier: Apache-2.0
"""The difference between two clocks that operators should know about. Pure.

Routing does not depend on wall clocks; logs, traces and chat templates that write the date do.
"""

from __future__ import annotations

# The Date header has whole seconds, and an answer takes some time; a host without NTP drifts this far within weeks.
CLOCK_S = 5.0
SET_CLOCKS = "run NTP on both machines: timedatectl set-ntp true"


def clock_difference(ahead_s: float) -> str | None:
    """Return how far one clock is off another, such as `7 s ahead of`; None if the difference does not matter."""
    if abs(ahead_s) <= CLOCK_S:
        return None
    return f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
