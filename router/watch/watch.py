# SPDX-License-Identifier: Apache-2.0
"""What the API shows of this room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvrouter.router.watch.decision_log import DecisionLog
from kvrouter.router.watch.event_feed import EventFeed


class Watch(NamedTuple):
    feed: EventFeed
    decisions: DecisionLog
    # The reply of another process behind this port, None where none has the decision.
    elsewhere: Callable[[str], Awaitable[bytes | None]] | None = None
