# SPDX-License-Identifier: Apache-2.0
"""What a subscriber may hold and how long it waits. Values only."""

from __future__ import annotations

import msgspec

from kvrouter.events.vllm.batch_cursor import DEFAULT_MAX_HELD, DEFAULT_MAX_HELD_BYTES

# An exact reply is a matter of milliseconds; vLLM looks at its replay socket every 100 ms at worst, and between two
# engine steps when busy.
DEFAULT_REPLAY_TIMEOUT_S = 5.0


class SubscriberSettings(msgspec.Struct, frozen=True):
    """Bounds and times. The defaults fit vLLM's (ring 10,000 batches, PUB high-water mark 100,000)."""

    replay_timeout_s: float = DEFAULT_REPLAY_TIMEOUT_S
    # After a connection: PUB learns of a subscription some milliseconds after the handshake, and what it sent before
    # that is seen only by asking.
    settle_s: float = 0.5
    # While the stream is silent, or its replay does not answer: how often to ask whether something was missed; 0 never.
    idle_check_s: float = 10.0
    max_held: int = DEFAULT_MAX_HELD
    max_held_bytes: int = DEFAULT_MAX_HELD_BYTES
    # Items waiting for the consumer; beyond either, sockets are left unread and ZMQ's own marks hold.
    max_waiting: int = 4_096
    max_waiting_bytes: int = 64 << 20
    # Items one `next` returns at most.
    max_items: int = 1_024
    # One turn of the loop: some 3 ms.
    turn_batches: int = 256
    turn_bytes: int = 1 << 20
    # Messages that ZMQ holds unread. Beyond, TCP holds the publisher back, and its own queue (vLLM's: 100,000) is the
    # buffer.
    receive_hwm: int = 2_048
    # Of an answer to a replay: a whole ring and more, because the publisher's socket drops what finds no room.
    replay_receive_hwm: int = 20_000
    # A larger message is damage; ZMQ drops the connection. 7 million hashes of one step, or token ids of a prompt of 12
    # M tokens.
    max_message_bytes: int = 64 << 20
    # ZMQ's own ping, so that a peer that vanished without a word is noticed.
    heartbeat_s: float = 5.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 2.0
    # After a lost connection that does not come back: how often the socket is made anew.
    reopen_s: float = 5.0
