# SPDX-License-Identifier: Apache-2.0
"""Bounds and times of a subscriber. Values only."""

from __future__ import annotations

from kvrouter.events.transport.settings import StreamSettings
from kvrouter.events.vllm.held_batches import DEFAULT_MAX_HELD


class SubscriberSettings(StreamSettings, frozen=True, kw_only=True):
    """Bounds and times. The defaults fit those of vLLM (ring 10,000 batches, PUB high-water mark 100,000)."""

    max_held: int = DEFAULT_MAX_HELD
    # Batches that PUB sent before it learned of a subscription are found only by a check.
    settle_s: float = 0.5
    # More messages than the publisher's replay buffer has: with a lower high-water mark ZMQ would drop a part of a full
    # replay.
    answer_hwm: int = 20_000
    # How often to check for missed batches while the stream is silent or its replay does not answer; 0 for never.
    idle_check_s: float = 10.0
    # The interval at which the socket is opened again after a lost connection that does not come back.
    reopen_s: float = 5.0
