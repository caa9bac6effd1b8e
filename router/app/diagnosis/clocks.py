# SPDX-License-Identifier: Apache-2.0
"""When two clocks differ so much that somebody should know. Nothing of the routing reads a wall clock: logs, traces and
chat templates that write the date do. Pure."""

from __future__ import annotations

# The Date header has whole seconds, and an answer takes some; a host without NTP drifts that far within weeks.
CLOCK_S = 5.0
SET_CLOCKS = "run NTP on both machines: timedatectl set-ntp true"


def clock_difference(ahead_s: float) -> str | None:
    """How one clock stands to the other, like `7 s ahead of`; None where that does not matter."""
    if abs(ahead_s) <= CLOCK_S:
        return None
    return f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
