# SPDX-License-Identifier: Apache-2.0
"""What a report subscriber may hold and how long it waits. Values only."""

from __future__ import annotations

import msgspec

from kvrouter.events.patch.cursor import DEFAULT_MAX_HELD, DEFAULT_MAX_HELD_BYTES
from kvrouter.events.patch.snapshot_assembly import DEFAULT_MAX_SNAPSHOT_BLOCKS

# Heartbeats missed in a row before a publisher counts as silent: one may be lost, and one late.
SILENT_INTERVALS = 3

# What the patch uses unless set; also where it says something that is no interval.
DEFAULT_HEARTBEAT_S = 1.0
MIN_HEARTBEAT_S = 0.01
MAX_HEARTBEAT_S = 600.0


class ReportSettings(msgspec.Struct, frozen=True):
    """Bounds and times. The defaults fit the engine patch's."""

    # Until the publisher says its own.
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    # Without progress, the answer to a request is given up.
    answer_timeout_s: float = 5.0
    # After a connection: PUB learns of a subscription some milliseconds after the handshake, and what it sends before
    # that is missing after the snapshot, which then has to come again. A first message ends the wait.
    settle_s: float = 0.2
    # Between two greetings at least, and between two snapshots; the latter doubles with every failure.
    greeting_pause_s: float = 0.1
    snapshot_pause_s: float = 0.2
    max_snapshot_pause_s: float = 30.0
    # How often a silent publisher is asked where it is.
    silent_greeting_s: float = 2.0
    # More than this late is our own stall, not the publisher's: what it sent meanwhile gets this long to arrive.
    grace_s: float = 0.25
    max_held: int = DEFAULT_MAX_HELD
    max_held_bytes: int = DEFAULT_MAX_HELD_BYTES
    max_snapshot_blocks: int = DEFAULT_MAX_SNAPSHOT_BLOCKS
    # Items waiting for the consumer; beyond either, sockets are left unread and ZMQ's own marks hold.
    max_waiting: int = 4_096
    max_waiting_bytes: int = 64 << 20
    # Items one `next` returns at most.
    max_items: int = 1_024
    # One turn of the loop: some 3 ms.
    turn_messages: int = 256
    turn_bytes: int = 1 << 20
    # Messages that ZMQ holds unread, besides those that wait at the publisher.
    receive_hwm: int = 2_048
    # Parts of a snapshot that wait unread, 64 KiB each: a snapshot is slowed down rather than piled up.
    snapshot_receive_hwm: int = 64
    # A larger message is damage; ZMQ drops the connection.
    max_message_bytes: int = 64 << 20
    # ZMQ's own ping, so that a peer that vanished without a word is noticed.
    ping_s: float = 5.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 2.0
