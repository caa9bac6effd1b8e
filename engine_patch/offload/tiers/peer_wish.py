# SPDX-License-Identifier: Apache-2.0
"""The state of one request's chunks at its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource

# None: the source has not answered. True: it holds the chunk. A reason: the chunk will not come.
Presence: TypeAlias = bool | PeerMiss | None


@dataclass(slots=True)
class PeerWish:
    """A request's source, and the state of each chunk that the request looked up there."""

    source: PeerSource
    # Seconds within which the chunks must arrive, from the first look-up on.
    timeout_s: float
    # When the request waits no longer; None before the first look-up.
    deadline_s: float | None = None
    presence: dict[OffloadKey, Presence] = field(default_factory=dict)
    # Chunks that the question at the end of this step will name.
    unqueried: list[OffloadKey] = field(default_factory=list)
    # Chunks that were fetched for the request.
    pulled: set[OffloadKey] = field(default_factory=set)
    # Whether no request needs the chunks: they belong to a hand-over, which counts them itself.
    is_hand_over: bool = False
