# SPDX-License-Identifier: Apache-2.0
"""What a virtual fleet is made of: replicas of one model, their memory and their speed. Pure values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.shapes import Geometry, make_geometry
from kvrouter.simulator.engine.replica import Replica
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.virtual_time import VirtualReplica

# Longer than any prompt of a trace: none is refused for its length alone.
CONTEXT_TOKENS = 2**20
REPLICAS = 8
# What a replica's cache holds, in tokens of all layers: an H100's 80 GB less 16 GB of weights, at 128 KiB a token.
CACHE_TOKENS = 400_000
# A replica that Mooncake's conversation trace loads to about a half: 12 k tokens a prompt and 0.43 prompts a second for
# each of eight.
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.015, decode_sequence_s=0.0004)


def geometry_of(shape: str, block_tokens: int) -> Geometry:
    """A trace distinguishes prompts in whole pieces, so a next turn leaves the prompt before it at a piece's end. With
    blocks smaller than a piece the checkpoint at a prompt's end would lie in its last, partial piece, where no trace
    can show that the next turn goes on. Raises UnsupportedGeometry."""
    return make_geometry(shape, block_size=block_tokens)


def blocks_of(geometry: Geometry, cache_tokens: int) -> int:
    """A block holds its tokens for the layers of one group; so memory for as many tokens has as many more blocks."""
    return len(geometry.groups) * cache_tokens // max(group.block_size for group in geometry.groups)


@dataclass(frozen=True, slots=True)
class FleetShape:
    """blocks: of each replica's GPU pool, all groups together; cpu_blocks: of its CPU tier, 0: it has none."""

    geometry: Geometry
    blocks: int
    workers: int = REPLICAS
    cpu_blocks: int = 0
    timing: Timing = TIMING

    def replica(self, on_step: Callable[[list[CacheEvent]], None]) -> VirtualReplica:
        """Raises ValueError for a size that is too small."""
        made = Replica(
            self.geometry,
            self.blocks,
            on_step=on_step,
            cpu_chunks=self.cpu_blocks,
            max_text_tokens=CONTEXT_TOKENS,
        )
        return VirtualReplica(made, self.timing)
