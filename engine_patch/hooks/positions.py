# SPDX-License-Identifier: Apache-2.0
"""The prompt positions of stored blocks, which vLLM's events leave out if a group keeps only some blocks.

The pool is not changed. A note about each stored event is kept until the reporter's thread takes it. The engine's
thread only adds notes, and dict operations are atomic, so there is no lock.
Source: vLLM 0.32.0 v1/core/block_pool.py, cache_full_blocks, cache_partial_block, emit_cached_block_events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrouter.engine_patch.reporter.translate import Notes, Position, merge_runs, short_hash
from kvrouter.engine_patch.setup.features import Feature, misfit

# Notes that may wait: the stored events of some thousand steps. More wait only if the pool's events are never taken,
# and then nothing needs the notes.
MAX_NOTES = 100_000

_CACHE_FULL = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id")
_CACHE_PARTIAL = ("request", "block", "num_tokens")


def note(notes: Notes, event: object, position: Position | None) -> None:
    """Remember the position of an event's blocks; None means that the event must not be reported."""
    if len(notes) >= MAX_NOTES:
        notes.clear()
    notes[id(event)] = (event, position)


def sparse_ends(
    blocks: Sequence[Any], mask: Sequence[bool] | None, first: int, stop: int, block_size: int
) -> list[int]:
    """Return the ends, in tokens, of the blocks first..stop-1 that were cached: neither null nor masked out."""
    if mask is None:
        return [(i + 1) * block_size for i in range(first, stop) if not blocks[i].is_null]
    return [(i + 1) * block_size for i in range(first, stop) if mask[i - first] and not blocks[i].is_null]


def hash_before(request: Any, end_tokens: int, block_size: int, hash_block_size: int) -> int | None:
    """Return the hash of the block before the one that ends at `end_tokens`, or None at the start of the prompt."""
    boundary = end_tokens - block_size
    return short_hash(request.block_hashes[boundary // hash_block_size - 1]) if boundary > 0 else None


def position_of(
    event: Any,
    request: Any,
    blocks: Sequence[Any],
    mask: Sequence[bool] | None,
    first: int,
    stop: int,
    block_size: int,
    hash_block_size: int,
) -> Position:
    """Return the position of a stored event's blocks.

    Args:
        event: vLLM's BlockStored event.
        request: The request whose blocks were cached.
        blocks: The request's blocks.
        mask: For each block from `first` on, whether it was to be cached; None: all were.
        first: Index of the first block that was to be cached.
        stop: Index after the last block that was to be cached.
        block_size: Tokens of a block.
        hash_block_size: Tokens of one of the request's block hashes.

    Raises:
        ValueError: The event does not have as many hashes as blocks were to be cached.
    """
    count = len(event.block_hashes)
    if count == stop - first:
        parent = event.parent_block_hash
        return Position([((first + 1) * block_size, count)], None if parent is None else short_hash(parent))
    if count == 0:
        return Position([], None)
    ends = sparse_ends(blocks, mask, first, stop, block_size)
    if len(ends) != count:
        raise ValueError(f"an event has {count} hashes for {len(ends)} cached blocks: expected as many")
    return Position(merge_runs(ends, block_size), hash_before(request, ends[0], block_size, hash_block_size))


def watch(pool: Any, notes: Notes, positions: Feature) -> None:
    """Record the positions at which one block pool stores blocks, by wrapping its methods on the instance."""
    positions.install(
        lambda: misfit(pool, "cache_full_blocks", _CACHE_FULL), lambda: _watch_full(pool, notes, positions)
    )
    if hasattr(pool, "cache_partial_block"):
        positions.install(
            lambda: misfit(pool, "cache_partial_block", _CACHE_PARTIAL),
            lambda: _watch_partial(pool, notes, positions),
        )


def watch_reuse(pool: Any, notes: Notes, reuse: Feature) -> None:
    """Keep blocks that a block pool announces again out of the reports.

    The wrapper passes all arguments on unchanged, so it fits every version that has the method.
    """
    if hasattr(pool, "emit_cached_block_events"):
        reuse.install(lambda: misfit(pool, "emit_cached_block_events", ()), lambda: _watch_reuse(pool, notes, reuse))


def _watch_full(pool: Any, notes: Notes, feature: Feature) -> None:
    original = pool.cache_full_blocks
    hash_block_size = pool.hash_block_size

    def cache_full_blocks(
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        before = len(pool.kv_event_queue)
        result = original(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, *rest, **kwargs
        )
        if feature.on:
            try:
                queue = pool.kv_event_queue
                if len(queue) > before:
                    mask = rest[0] if rest else kwargs.get("block_mask")
                    event = queue[-1]
                    position = position_of(
                        event, request, blocks, mask, num_cached_blocks, num_full_blocks, block_size, hash_block_size
                    )
                    note(notes, event, position)
            except Exception:
                feature.failed()
        return result

    pool.cache_full_blocks = cache_full_blocks


def _watch_partial(pool: Any, notes: Notes, feature: Feature) -> None:
    original = pool.cache_partial_block

    def cache_partial_block(request: Any, block: Any, num_tokens: int, *rest: Any, **kwargs: Any) -> Any:
        before = len(pool.kv_event_queue)
        result = original(request, block, num_tokens, *rest, **kwargs)
        if feature.on:
            try:
                queue = pool.kv_event_queue
                # The call may have removed entries and stored none; the last event is then a removal.
                if len(queue) > before and type(queue[-1]).__name__ == "BlockStored":
                    parent = queue[-1].parent_block_hash
                    parent_hash = None if parent is None else short_hash(parent)
                    note(notes, queue[-1], Position([(num_tokens, 1)], parent_hash))
            except Exception:
                feature.failed()
        return result

    pool.cache_partial_block = cache_partial_block


def _watch_reuse(pool: Any, notes: Notes, feature: Feature) -> None:
    """Mark the events that repeat resident blocks as unreported.

    Some of these blocks are null ones. If the ledger counted the events, the blocks would never be removed from it.
    """
    original = pool.emit_cached_block_events

    def emit_cached_block_events(*args: Any, **kwargs: Any) -> Any:
        before = len(pool.kv_event_queue)
        result = original(*args, **kwargs)
        if feature.on:
            try:
                for event in pool.kv_event_queue[before:]:
                    note(notes, event, None)
            except Exception:
                feature.failed()
        return result

    pool.emit_cached_block_events = emit_cached_block_events
