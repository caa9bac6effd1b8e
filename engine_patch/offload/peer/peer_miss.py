# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a chunk of a peer did not arrive, so that the engine computes it."""

from __future__ import annotations

import enum


class PeerMiss(enum.Enum):
    """The reason why a chunk did not come from its source. The value stands in a metric's name and on the wire."""

    # The source does not hold the chunk.
    ABSENT = "absent"
    # The source held the chunk when it was queried, and evicted it before it was borrowed.
    EVICTED = "evicted"
    # The chunk was not here in time.
    DEADLINE = "deadline"
    # No engine answers at the address, or it ended during the transfer.
    GONE = "gone"
    # An earlier transfer from the source is overdue, so it gets no new ones until that has ended.
    STALLED = "stalled"
    # The source has another model, other weights, another block size or another division among ranks.
    LAYOUT = "layout"
    # The source names its blocks with another seed.
    SEED = "seed"
    # One of the two engines was reset more often, so their weights may differ.
    RESETS = "resets"
    # The content that arrived is not that of the chunk.
    CHECKSUM = "checksum"
    # The source lends as much as it may, or this engine uses as many sources as it may.
    BUSY = "busy"
    # There was no room in CPU memory here.
    NO_ROOM = "no_room"
    # The address may not be used: it is not on this machine, or not listed.
    FORBIDDEN = "forbidden"
    # The source's messages could not be understood.
    PROTOCOL = "protocol"
    # NIXL reported an error.
    TRANSFER = "transfer"
    # A fault of the program, here or at the source, which is in that engine's log.
    FAULT = "fault"


def miss_of(value: str) -> PeerMiss:
    """Return the reason of a source's refusal; one that this version does not know counts as PROTOCOL."""
    try:
        return PeerMiss(value)
    except ValueError:
        return PeerMiss.PROTOCOL
