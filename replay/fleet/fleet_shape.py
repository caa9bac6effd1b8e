# SPDX-License-Identifier: Apache-2.0
"""The parts of a virtual fleet: replicas of one model, the memory and speed of each, and when they restart.

Pure values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.shapes import Geometry, make_geometry
from kvrouter.simulator.engine.replica import Replica
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.virtual_time import VirtualReplica

# Longer than any prompt of a trace, so that no prompt is refused for its length alone.
CONTEXT_TOKENS = 2**20
REPLICAS = 8
# The size of a replica's cache in tokens of all layers: an H100's 80 GB less 16 GB of weights, at 128 KiB a token.
CACHE_TOKENS = 400_000
# The speed of a replica that Mooncake's conversation trace loads to about a half: 12 k tokens a prompt and 0.43 prompts
# a second for each of eight.
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.015, decode_sequence_s=0.0004)


def geometry_of(shape: str, block_tokens: int) -> Geometry:
    """Return the geometry of a shape with blocks of `block_tokens`. Raises UnsupportedGeometry.

    A block should be a piece of the trace. A trace distinguishes prompts in whole pieces, so a next turn leaves the
    prompt before it at a piece's end. With smaller blocks, the checkpoint at a prompt's end would lie in its last,
    partial piece, and no trace can show that the next turn continues from there.
    """
    return make_geometry(shape, block_size=block_tokens)


def blocks_of(geometry: Geometry, cache_tokens: int) -> int:
    """Return how many blocks hold `cache_tokens` tokens.

    A block holds its tokens for the layers of one group, so N groups need N times as many blocks.
    """
    return len(geometry.groups) * cache_tokens // max(group.block_size for group in geometry.groups)


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """One replica's memory and speed."""

    # Blocks of the GPU pool, all groups together.
    blocks: int
    # Blocks of the CPU tier; 0 for no tier.
    cpu_blocks: int = 0
    timing: Timing = TIMING


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """The speed at which each replica lends chunks of its CPU tier to the others."""

    bytes_per_s: float
    # The way of a question to the source and back.
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < math.inf and 0 <= self.latency_s < math.inf):
            raise ValueError(
                f"the speed of a link must be above 0 and finite, and its latency 0 or more, unlike in {self}"
            )


@dataclass(frozen=True, slots=True)
class Restart:
    """The moment at which a replica's process is replaced by a new one with empty caches."""

    # Seconds of virtual time after the first request. The speedup does not change it.
    time_s: float
    # Index of the replica in the fleet.
    worker: int


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet of replicas of one model. Every restart names one of its replicas, at a time from 0 on."""

    geometry: Geometry
    replicas: tuple[ReplicaShape, ...]
    restarts: tuple[Restart, ...] = ()
    # None: no replica lends.
    peer: PeerSpeed | None = None

    def __post_init__(self) -> None:
        """Check the replicas and the restarts. Raises ValueError for a fleet that is impossible."""
        if not self.replicas:
            raise ValueError("a fleet has at least one replica")
        for restart in self.restarts:
            if not 0 <= restart.worker < len(self.replicas):
                raise ValueError(
                    f"there is no worker {restart.worker} to restart: the last is {len(self.replicas) - 1}"
                )
            if not 0 <= restart.time_s < math.inf:
                raise ValueError(f"a restart at {restart.time_s:g} s: give seconds from 0 on")

    def replica(self, number: int, on_step: Callable[[float, list[CacheEvent]], None]) -> VirtualReplica:
        """Create the replica at this index of the fleet, empty. Raises ValueError for a size that is too small.

        `on_step` is called for each step that publishes events, with its time and its events.
        """
        shape, timing = self.replicas[number], self.replicas[number].timing
        if self.peer is not None:
            timing = timing.lending(self.geometry, self.peer.bytes_per_s, self.peer.latency_s)
        replica = Replica(
            self.geometry,
            shape.blocks,
            on_step=lambda events: on_step(virtual.now_s, events),
            cpu_chunks=shape.cpu_blocks,
            max_text_tokens=CONTEXT_TOKENS,
        )
        virtual = VirtualReplica(replica, timing)
        return virtual
