# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a chunk of a peer did not arrive, so that the engine computes it."""

from __future__ import annotations

import enum


class PeerMiss(enum.Enum):
    """The reason why a chunk did not come from its source. The value stands in a metric's name and on the wire.

    `PEER_MISSES` in `engine_patch/offload/metrics.py` says what each reason means.
    """

    ABSENT = "absent"
    EVICTED = "evicted"
    DISK = "disk"
    DEADLINE = "deadline"
    GONE = "gone"
    STALLED = "stalled"
    LAYOUT = "layout"
    SEED = "seed"
    RESETS = "resets"
    CHECKSUM = "checksum"
    BUSY = "busy"
    NO_ROOM = "no_room"
    FORBIDDEN = "forbidden"
    PROTOCOL = "protocol"
    TRANSFER = "transfer"
    FAULT = "fault"


def miss_of(value: str) -> PeerMiss:
    """Return the reason of a source's refusal; one that this version does not know counts as PROTOCOL."""
    try:
        return PeerMiss(value)
    except ValueError:
        return PeerMiss.PROTOCOL
