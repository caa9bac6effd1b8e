# SPDX-License-Identifier: Apache-2.0
"""A replica's events on the wire: one batch for each step, in vLLM's own structs and framing."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.wire import WireCleared, WireEvent, WireRemoved, WireStored
from kvrouter.simulator.cache.cpu_tier import CacheEvent, EvictedChunk, OffloadedChunk
from kvrouter.simulator.cache.pool import Removed, Stored
from kvrouter.simulator.cache.shapes import Geometry

GPU, CPU = "GPU", "CPU"


def to_wire(event: CacheEvent, geometry: Geometry) -> WireEvent:
    """Return the event as vLLM 0.32 would publish it, with whole 32-byte hashes; the encoder shortens them.

    For a block that arrives on the CPU, the event has only the hash and the group, as in vLLM without
    self_describing_kv_events.
    """
    if isinstance(event, OffloadedChunk):
        return WireStored(
            block_hashes=[event.key.block_hash],
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=CPU,
            lora_name=None,
            group_idx=event.key.group_idx,
        )
    if isinstance(event, EvictedChunk):
        return WireRemoved(block_hashes=list(event.hashes), medium=CPU, group_idx=event.group_idx)
    if isinstance(event, Stored):
        shape = geometry.groups[event.group_idx]
        return WireStored(
            block_hashes=list(event.hashes),
            parent_block_hash=event.parent,
            token_ids=list(event.tokens),
            block_size=event.block_size,
            lora_id=None,
            medium=GPU,
            lora_name=None,
            extra_keys=list(event.extra_keys) or None,
            group_idx=event.group_idx,
            kv_cache_spec_kind=shape.kind,
            kv_cache_spec_sliding_window=shape.sliding_window,
        )
    if isinstance(event, Removed):
        return WireRemoved(block_hashes=[event.key.block_hash], medium=GPU, group_idx=event.key.group_idx)
    return WireCleared()


class EventStream:
    """A sender of each step's events as one batch. The owner of the publisher closes the publisher."""

    def __init__(
        self,
        geometry: Geometry,
        publisher: EventPublisher,
        *,
        clock: Callable[[], float],
        dp_rank: int = 0,
        is_published: bool = True,
    ) -> None:
        """Create a sender.

        Args:
            geometry: The groups that events name by index.
            publisher: Sends the batches.
            clock: Wall clock in seconds, for the timestamps of batches.
            dp_rank: The data-parallel rank in each batch.
            is_published: Whether events are sent. The publisher's sockets are open in either case.
        """
        self._geometry = geometry
        self._publisher = publisher
        self._clock = clock
        self._dp_rank = dp_rank
        self._is_published = is_published
        self._lose = 0

    def send(self, events: list[CacheEvent]) -> None:
        """Queue one batch. Blocks only while the publisher's queue is full, as vLLM does."""
        if not self._is_published:
            return
        if self._lose:
            self._lose -= 1
            self._publisher.skip_seq()
            return
        wire = [to_wire(event, self._geometry) for event in events]
        self._publisher.publish(encode_batch(self._clock(), wire, self._dp_rank))

    def drop(self, batches: int) -> None:
        """Do not send the next batches, but keep them for a replay."""
        self._publisher.drop_next(batches)

    def lose(self, batches: int) -> None:
        """Lose the next batches: their numbers are used up, and a replay lacks them too."""
        self._lose = batches
