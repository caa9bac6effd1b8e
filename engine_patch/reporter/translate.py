# SPDX-License-Identifier: Apache-2.0
"""Translates vLLM's KV events and raw offloading events, of any version, to events of the patch's topic.

Pure, and without importing vLLM: events are recognized by their type's name and read by attribute. It runs in the
reporter's thread, off the engine's path. Side notes about an event (the position of its blocks, or that it must not be
reported) are found by the event's identity.
Sources: vLLM 0.20 to 0.33 distributed/kv_events.py, v1/kv_offload/base.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvrouter.engine_patch.offload.key import GROUP_BYTES, group_of
from kvrouter.events.patch.messages import ReportCleared, ReportEvent, ReportRemoved, ReportStored
from kvrouter.events.vllm.messages import GPU

_HASH_MASK = (1 << 64) - 1
HASH_BYTES = 8

Runs: TypeAlias = list[tuple[int, int]]


class Position(NamedTuple):
    """The position of the blocks of one stored event: `ReportStored.runs` and `.parent_hash`."""

    runs: Runs
    parent_hash: int | None


# id(event) -> (the event, kept alive so that no other object gets its id; the position of its blocks, or None if it
# must not be reported).
Notes: TypeAlias = dict[int, tuple[object, Position | None]]


class OffloadGroup(NamedTuple):
    """The group facts that a raw offloading event lacks."""

    # Tokens of a block.
    block_size: int
    kind: str | None
    # Tokens of the window, or None without one.
    sliding_window: int | None


class Chunk(NamedTuple):
    """The facts of an offloaded chunk that were known when its transfer began."""

    # Position of the chunk's end in the prompt, in tokens.
    end_tokens: int
    # Tokens of a block.
    block_size: int
    # Hash of the block before the chunk's last block.
    parent_hash: int | None
    lora_name: str | None


Place: TypeAlias = tuple[int | None, str, str | None, str | None]


def short_hash(block_hash: int | bytes) -> int:
    """Return the last 8 bytes of an engine's hash, which is an int or bytes."""
    if isinstance(block_hash, int):
        return block_hash & _HASH_MASK
    return int.from_bytes(block_hash[-HASH_BYTES:], "big")


def pack(block_hashes: Collection[int | bytes]) -> bytes:
    """Return hashes, ints or bytes, as 8 bytes each, big-endian."""
    return struct.pack(f">{len(block_hashes)}Q", *map(short_hash, block_hashes))


def medium_name(medium: Any) -> str:
    """Return a medium's name in upper case; enums count by their value, and an absent medium is the GPU."""
    return GPU if medium is None else str(getattr(medium, "value", medium)).upper()


def _text(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))


def translate(events: Iterable[Any], notes: Notes, left_out: Collection[int] = ()) -> list[ReportEvent]:
    """Translate one batch of events, in order.

    Removals between two other events are merged by place, because their order among themselves has no meaning.

    Args:
        events: vLLM's events.
        notes: Side notes about events; those of the batch are removed.
        left_out: Ids of events that another source reports.
    """
    reported: list[ReportEvent] = []
    removed: dict[Place, list[int]] = {}
    for event in events:
        note = notes.pop(id(event), None)
        if id(event) in left_out:
            continue
        position = None
        if note is not None and note[0] is event:
            position = note[1]
            if position is None:
                continue
        name = type(event).__name__
        if name == "BlockRemoved":
            removed.setdefault(_place(event), []).extend(map(short_hash, event.block_hashes))
        elif name in ("BlockStored", "AllBlocksCleared"):
            _flush(removed, reported)
            if name == "AllBlocksCleared":
                # A clear that a hook has reported already has a note and is skipped above. So this one comes from the
                # GPU's pool, the only pool for whose reset every version sends this event.
                reported.append(ReportCleared(GPU, "prefix cache reset"))
            elif event.block_hashes:
                reported.append(_stored(event, position))
    _flush(removed, reported)
    return reported


def _place(event: Any) -> Place:
    return (
        getattr(event, "group_idx", None),
        medium_name(event.medium),
        getattr(event, "ownership", None),
        getattr(event, "locality", None),
    )


def _flush(removed: dict[Place, list[int]], reported: list[ReportEvent]) -> None:
    for (group_idx, medium, ownership, locality), hashes in removed.items():
        reported.append(ReportRemoved(pack(hashes), group_idx, medium, ownership, locality))
    removed.clear()


def _stored(event: Any, position: Position | None) -> ReportStored:
    group_idx, medium, ownership, locality = _place(event)
    parent = event.parent_block_hash
    if position is None:
        # The event's own parent is the block before the event's range. That is the block before its first stored block
        # only if no block is left out.
        sparse = len(event.token_ids) != len(event.block_hashes) * event.block_size
        position = Position([], None if parent is None or sparse else short_hash(parent))
    return ReportStored(
        hashes=pack(event.block_hashes),
        group_idx=group_idx,
        medium=medium,
        block_size=event.block_size,
        runs=position.runs,
        parent_hash=position.parent_hash,
        kind=_text(getattr(event, "kv_cache_spec_kind", None)),
        sliding_window=getattr(event, "kv_cache_spec_sliding_window", None),
        ownership=ownership,
        locality=locality,
        lora_name=event.lora_name,
    )


def translate_offloaded(
    events: Iterable[Any], groups: Mapping[int, OffloadGroup], chunk_of: Callable[[bytes], Chunk | None]
) -> list[ReportEvent]:
    """Translate raw OffloadingEvents: a report has one hash for each chunk, that of the chunk's last block.

    That form does not depend on how vLLM's version reports chunks on its own topic.
    """
    reported: list[ReportEvent] = []
    for event in events:
        if getattr(event, "metadata_only", False):
            # From 0.33 on, such an event drops vLLM's notes about the chunks of a failed transfer, which were never
            # resident.
            continue
        medium, locality = medium_name(event.medium), _text(getattr(event, "locality", None))
        ownership = getattr(event, "ownership", None)
        keys_of: dict[int, list[bytes]] = {}
        for key in event.keys:
            keys_of.setdefault(group_of(key), []).append(key)
        for group_idx, keys in keys_of.items():
            if event.removed:
                hashes = pack([key[:-GROUP_BYTES] for key in keys])
                reported.append(ReportRemoved(hashes, group_idx, medium, ownership, locality))
                continue
            group = groups.get(group_idx)
            for block_size, lora_name, ordered, position in _series(keys, group, chunk_of):
                reported.append(
                    ReportStored(
                        hashes=pack([key[:-GROUP_BYTES] for key in ordered]),
                        group_idx=group_idx,
                        medium=medium,
                        block_size=block_size,
                        runs=position.runs,
                        parent_hash=position.parent_hash,
                        kind=group.kind if group else None,
                        sliding_window=group.sliding_window if group else None,
                        ownership=ownership,
                        locality=locality,
                        lora_name=lora_name,
                    )
                )
    return reported


def _series(
    keys: Iterable[bytes], group: OffloadGroup | None, chunk_of: Callable[[bytes], Chunk | None]
) -> Iterable[tuple[int, str | None, list[bytes], Position]]:
    """Yield series of one group's keys that one report can name.

    Returns:
        (block_size, lora_name, keys in the order of their ends, position). Keys without a known chunk come first.
    """
    unknown: list[bytes] = []
    known: dict[tuple[int, str | None], list[tuple[Chunk, bytes]]] = {}
    for key in keys:
        chunk = chunk_of(key)
        if chunk is None:
            unknown.append(key)
        else:
            known.setdefault((chunk.block_size, chunk.lora_name), []).append((chunk, key))
    if unknown:
        yield group.block_size if group else 0, None, unknown, Position([], None)
    for (block_size, lora_name), chunks in known.items():
        chunks.sort(key=lambda item: item[0].end_tokens)
        runs = merge_runs((chunk.end_tokens for chunk, _ in chunks), block_size)
        yield block_size, lora_name, [key for _, key in chunks], Position(runs, chunks[0][0].parent_hash)


def merge_runs(ends_tokens: Iterable[int], block_size: int) -> Runs:
    """Merge ascending ends of blocks into runs of neighbours, each as (end of the first block, number of blocks)."""
    runs: Runs = []
    first = count = 0
    for end in ends_tokens:
        if count and end == first + count * block_size:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first, count = end, 1
    if count:
        runs.append((first, count))
    return runs
