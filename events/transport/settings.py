# SPDX-License-Identifier: Apache-2.0
"""Bounds and times of connections and subscribers. Values only."""

from __future__ import annotations

import msgspec

# A batch of a long prefill is some 100 KB; this bounds what a flood can cost during one answer.
DEFAULT_MAX_HELD_BYTES = 256 << 20


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and times of one connection."""

    # A larger message counts as damaged, and the connection is dropped, by ZMQ itself if one frame is larger. 7 million
    # hashes of one step fit, or the token ids of a prompt of 12 M tokens.
    max_message_bytes: int = 64 << 20
    # The size of all whole messages that wait unread; with more, the connection is dropped. `receive_hwm` batches of a
    # long prefill fit.
    max_unread_bytes: int = 256 << 20
    # Seconds between ZMQ's own pings, and until the answer to one. Without an answer, ZMQ closes the connection and
    # opens another, so the wait is longer than any standstill of an engine. A thousand engines are pinged a hundred
    # times a second.
    ping_s: float = 10.0
    ping_answer_s: float = 15.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 2.0


class StreamSettings(LinkSettings, frozen=True, kw_only=True):
    """Bounds and times of the subscribers of both streams."""

    # Messages that are held back while an answer is under way.
    max_held: int
    max_held_bytes: int = DEFAULT_MAX_HELD_BYTES
    # The pause after a connection: PUB learns of a subscription some milliseconds after the handshake.
    settle_s: float
    # The time without progress after which an answer is given up. An answer takes milliseconds, but vLLM looks at its
    # replay socket only every 100 ms at worst, and between two engine steps when busy.
    answer_timeout_s: float = 5.0
    # A deadline missed by more than this is our own stall, not the publisher's, so its messages get this long to
    # arrive.
    grace_s: float = 0.25
    # Items that wait for the consumer. Beyond either limit, sockets are left unread and ZMQ's own limits apply.
    max_waiting: int = 4_096
    max_waiting_bytes: int = 64 << 20
    # The most items that one `next` returns.
    max_items: int = 1_024
    # The budget of one turn of the loop, which takes some 3 ms.
    turn_messages: int = 256
    turn_bytes: int = 1 << 20
    # Messages that ZMQ holds unread. Beyond these, TCP holds the publisher back, and the publisher's own queue (vLLM's:
    # 100,000) is the buffer.
    receive_hwm: int = 2_048
    # Messages and bytes of an answer to a request that wait unread. A ring of 10,000 batches of a long prefill arrives
    # faster than it is decoded.
    answer_hwm: int
    answer_max_unread_bytes: int = 1 << 30
