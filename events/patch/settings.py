# SPDX-License-Identifier: Apache-2.0
"""Bounds and times of a report subscriber. Values only."""

from __future__ import annotations

from kvrouter.events.patch.cursor import DEFAULT_MAX_HELD
from kvrouter.events.patch.snapshot_assembly import DEFAULT_MAX_SNAPSHOT_BLOCKS
from kvrouter.events.transport.settings import StreamSettings

# Heartbeats missed in a row before a publisher counts as silent: one may be lost, and one may be late.
SILENT_INTERVALS = 3

# The patch's default; also used if the patch announces a value that is no interval.
DEFAULT_HEARTBEAT_S = 1.0
MIN_HEARTBEAT_S = 0.01
MAX_HEARTBEAT_S = 600.0


class ReportSettings(StreamSettings, frozen=True, kw_only=True):
    """Bounds and times of the report stream. The defaults fit the engine patch's."""

    max_held: int = DEFAULT_MAX_HELD
    # The first wait for the subscription: messages that PUB sends before it learns of the subscription are missing
    # after the snapshot, which then has to be repeated. A first message ends the wait.
    settle_s: float = 0.2
    # Parts of a snapshot, 64 KiB each. The limit is low, so that a snapshot is slowed down instead of piling up.
    answer_hwm: int = 64
    # The interval until the publisher announces its own.
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    # The least pause between two greetings and between two snapshots; the latter doubles with every failure.
    greeting_pause_s: float = 0.1
    snapshot_pause_s: float = 0.2
    max_snapshot_pause_s: float = 30.0
    # The pause between two greetings of a silent publisher.
    silent_greeting_s: float = 2.0
    max_snapshot_blocks: int = DEFAULT_MAX_SNAPSHOT_BLOCKS
