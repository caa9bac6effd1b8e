# SPDX-License-Identifier: Apache-2.0
"""Chunks that a replica fetches from the CPU tier of another one, which its request names as its source. No I/O or clock.

The books are those of the engine's own peer tier (`engine_patch/offload/tiers/peer_tier.py`), except that a look-up
knows at once what the source holds.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from kvrouter.simulator.cache.cpu_tier import CpuTier
from kvrouter.simulator.cache.pool import Key


class PeerMiss(enum.Enum):
    """The reason why a chunk does not come from the source."""

    # The source does not hold the chunk, or no longer.
    ABSENT = "absent"
    DEADLINE = "deadline"
    GONE = "gone"
    NO_ROOM = "no_room"


@dataclass(eq=False, slots=True)
class Lender:
    """A replica's CPU tier as others read it, and the link over which all of them do."""

    tier: CpuTier
    # When the link has carried everything that was requested from it, in seconds.
    free_s: float = 0.0
    # Whether the replica's process has ended.
    gone: bool = False


@dataclass(slots=True, eq=False)
class PeerWish:
    """One request's source, and the state of the chunks that the request looked up there."""

    source: Lender
    # Seconds within which the chunks must arrive, from the first fetch on.
    timeout_s: float
    # When the request waits no longer; None before the first fetch.
    deadline_s: float | None = None
    is_late: bool = False
    # Chunks that do not come, and why.
    missed: dict[Key, PeerMiss] = field(default_factory=dict)
    # Chunks that the request's last look-up found, or waits for.
    needed: set[Key] = field(default_factory=set)
    # Chunks that the last look-up found at the source alone, each in the order of the look-up.
    missing: dict[Key, None] = field(default_factory=dict)
    # Chunks that the source was queried for and holds, and those among them that the next question names.
    queried: set[Key] = field(default_factory=set)
    unqueried: list[Key] = field(default_factory=list)
    # Chunks that were fetched for the request.
    pulled: set[Key] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Pull:
    """Chunks under way from a source.

    The driver ends a pull when the bytes have arrived. A late one it also ends at the deadline of its request: from then
    on the request waits no longer, and the room of the chunks stays taken.
    """

    number: int
    wish: PeerWish
    keys: tuple[Key, ...]
    # Whether the bytes arrive after the deadline; the driver knows when the pull begins.
    arrives_late: bool = False
    given_up: bool = False


@dataclass(slots=True)
class PeerCounts:
    """Chunks that came from other replicas, and those that did not by reason, since the start."""

    pulled: int = 0
    missed: Counter[PeerMiss] = field(default_factory=Counter)
