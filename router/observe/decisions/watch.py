# SPDX-License-Identifier: Apache-2.0
"""The parts of the room that the API shows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.observe.decisions.decision_log import DecisionFilter, DecisionLog


class Watch(NamedTuple):
    """The events and decisions that the API shows."""

    feed: EventFeed
    decisions: DecisionLog
    # Returns the reply of another process behind this port about a decision; None if no process has it.
    elsewhere: Callable[[str], Awaitable[bytes | None]] | None = None
    # Returns the replies of the other processes on this port, which list their last decisions.
    lists_elsewhere: Callable[[int, DecisionFilter], Awaitable[list[bytes]]] | None = None
