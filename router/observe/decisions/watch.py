# SPDX-License-Identifier: Apache-2.0
"""What the API shows of this room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.observe.decisions.decision_log import DecisionLog


class Watch(NamedTuple):
    feed: EventFeed
    decisions: DecisionLog
    # The reply of another process behind this port, None where none has the decision.
    elsewhere: Callable[[str], Awaitable[bytes | None]] | None = None
