# SPDX-License-Identifier: Apache-2.0
"""Pauses that end together, so that the periodic work of a process wakes it once instead of once for each task.

A wake-up costs an idle process more than most of this work does, because its caches are cold. A process that serves
calls `begin`; without it, as in simulations, each pause has its whole length.
"""

from __future__ import annotations

import asyncio
import math
from weakref import WeakKeyDictionary

# The time between two ticks. Shorter pauses are kept as they are.
TICK_S = 0.05
# The part of a tick by which a timer may be early: the timers of uvloop have milliseconds.
EARLY_PART = 0.1

# The time of the first tick, by loop. Processes of one machine begin at different times, so they do not tick at once.
_first_ticks: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()


def begin(loop: asyncio.AbstractEventLoop) -> None:
    """Have all later pauses on this loop end at its ticks, the first of which is now."""
    _first_ticks[loop] = loop.time()


def pause_s(period_s: float) -> float:
    """Return the time until the last tick within `period_s`: less than a tick shorter than the period.

    Pauses of whole ticks that follow one another have the whole period, from the second one on.
    """
    loop = asyncio.get_running_loop()
    first_s = _first_ticks.get(loop)
    if first_s is None or period_s < TICK_S:
        return period_s
    passed_s = loop.time() - first_s
    return max(0.0, math.floor((passed_s + period_s) / TICK_S + EARLY_PART) * TICK_S - passed_s)


async def sleep(period_s: float) -> None:
    """Sleep for `pause_s(period_s)`."""
    await asyncio.sleep(pause_s(period_s))
