# SPDX-License-Identifier: Apache-2.0
"""A wait for an event that takes a limited time."""

from __future__ import annotations

import asyncio
import contextlib


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until the event is set, but at most `timeout_s` seconds; return whether it is set. None: wait forever."""
    # wait_for is no choice here: up to Python 3.11 it swallows a cancellation at the moment of the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
