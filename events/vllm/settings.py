# SPDX-License-Identifier: Apache-2.0
"""What a subscriber may hold and how long it waits. Values only."""

from __future__ import annotations

from kvrouter.events.transport.settings import StreamSettings
from kvrouter.events.vllm.held_batches import DEFAULT_MAX_HELD


class SubscriberSettings(StreamSettings, frozen=True, kw_only=True):
    """Bounds and times. The defaults fit vLLM's (ring 10,000 batches, PUB high-water mark 100,000)."""

    max_held: int = DEFAULT_MAX_HELD
    # What PUB sent before it learned of a subscription is found only by a check.
    settle_s: float = 0.5
    # A whole ring and more, because the publisher's socket drops what finds no room.
    answer_hwm: int = 20_000
    # While the stream is silent, or its replay does not answer: how often to check for missed batches; 0: never.
    idle_check_s: float = 10.0
    # After a lost connection that does not come back: how often the socket is opened again.
    reopen_s: float = 5.0
