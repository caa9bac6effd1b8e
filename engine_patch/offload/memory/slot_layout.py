# SPDX-License-Identifier: Apache-2.0
"""The places of each group's pages within a slot, and the plan of one transfer between engine blocks and slots.

A slot holds one chunk, blocks_per_chunk consecutive blocks of one group, whichever group that is. A group's *refs* are
the tensors that hold a part of its blocks. Within one rank's part of the slot the pages of ref 0 come first, block
after block, then those of ref 1, and so on, without gaps: consecutive blocks of a chunk lie side by side, as they often
do in the engine's cache. No I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The blocks of one group that one transfer moves.

    The blocks follow one another in their request; the first and the last chunk may be partial.
    """

    group: int
    # (n,) the engine's block numbers, in the order of the request.
    block_ids: IdArray
    # Index of block_ids[0] in its request, in blocks: it is sub-block first_block % blocks_per_chunk of slots[0].
    first_block: int
    # (chunks,) the slot of each chunk that the blocks touch.
    slots: IdArray


Plan = tuple[GroupPart, ...]


def make_plan(
    block_ids: Sequence[int] | npt.NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    slots: Sequence[int] | npt.NDArray[np.integer],
    blocks_per_chunk: int,
) -> Plan:
    """Return a plan from flat lists, one group after the other, as in vLLM's GPULoadStoreSpec.

    Source: vLLM 0.32 v1/kv_offload/base.py.

    Args:
        block_ids: (sum of group_sizes,) the engine's block numbers.
        group_sizes: (groups,) number of blocks of each group; a group without blocks is left out of the plan.
        block_indices: (groups,) index in the request of each group's first block.
        slots: (chunks of all groups,) the slot of each chunk.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        ValueError: The lists do not fit each other.
    """
    if len(group_sizes) != len(block_indices):
        raise ValueError(f"{len(group_sizes)} group sizes, but {len(block_indices)} first block indices")
    blocks = np.asarray(block_ids, np.int64)
    chunk_slots = np.asarray(slots, np.int64)
    parts = []
    block = slot = 0
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if size == 0:
            continue
        chunks = num_chunks(size, first, blocks_per_chunk)
        parts.append(GroupPart(group, blocks[block : block + size], first, chunk_slots[slot : slot + chunks]))
        block += size
        slot += chunks
    if block != len(blocks) or slot != len(chunk_slots):
        raise ValueError(
            f"groups of {list(group_sizes)} blocks from {list(block_indices)} on, {blocks_per_chunk} a chunk, take {block} "
            f"blocks and {slot} slots; the transfer names {len(blocks)} and {len(chunk_slots)}"
        )
    return tuple(parts)


def num_chunks(num_blocks: int, first_block: int, blocks_per_chunk: int) -> int:
    """Return how many chunks are touched by consecutive blocks, the first with index `first_block` in its request."""
    return -(-(first_block % blocks_per_chunk + num_blocks) // blocks_per_chunk)


def chunk_bytes(page_bytes: Sequence[int], blocks_per_chunk: int) -> int:
    """Return the bytes of one rank's chunk of a group, whose refs have pages of `page_bytes` each."""
    return sum(page_bytes) * blocks_per_chunk


@dataclass(frozen=True)
class SlotLayout:
    """The places of each group's pages within one rank's part of a slot.

    Raises ValueError, with both numbers, if a chunk of a group takes more than slot_bytes.
    """

    # Bytes of one block's page, for each ref of each group.
    groups: tuple[tuple[int, ...], ...]
    blocks_per_chunk: int
    # Bytes of one rank's part of a slot.
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk in kv_connector_extra_config is 1 or more, not {self.blocks_per_chunk}")
        for group, pages in enumerate(self.groups):
            if any(page < 1 for page in pages):
                raise ValueError(f"group {group} has a page of {min(pages)} bytes")
            need = chunk_bytes(pages, self.blocks_per_chunk)
            if need > self.slot_bytes:
                raise ValueError(
                    f"a chunk of group {group} takes {need} bytes ({self.blocks_per_chunk} blocks of {sum(pages)}), a rank's part "
                    f"of a slot has {self.slot_bytes}: lower blocks_per_chunk in kv_connector_extra_config or take larger slots"
                )

    def offset(self, group: int, ref: int, sub_block: int) -> int:
        """Return the byte of a page within the rank's part of its slot.

        Raises IndexError for a page that does not exist.
        """
        pages = self.groups[group]
        if not 0 <= sub_block < self.blocks_per_chunk:
            raise IndexError(f"sub-block {sub_block} does not exist: a chunk has 0 to {self.blocks_per_chunk - 1}")
        return chunk_bytes(pages[:ref], self.blocks_per_chunk) + sub_block * pages[ref]

    def page_offsets(self, part: GroupPart, slot_stride: int) -> Iterator[IdArray]:
        """Yield, for each ref of the group, the offsets of all blocks' pages, in bytes after the rank's part of slot 0.

        Each array is (n,) for n blocks. `slot_stride` is the number of bytes from one slot to the next. Raises
        ValueError if the part does not have one slot for each chunk.
        """
        k = self.blocks_per_chunk
        count = len(part.block_ids)
        chunks = num_chunks(count, part.first_block, k)
        if len(part.slots) != chunks:
            raise ValueError(
                f"{count} blocks of group {part.group} from block {part.first_block} on touch {chunks} chunks of {k}, "
                f"the transfer names {len(part.slots)} slots"
            )
        pages = self.groups[part.group]
        refs = [chunk_bytes([page], k) for page in pages]
        firsts = accumulate(refs, initial=0)
        if k == 1:
            starts = part.slots * slot_stride
            yield from (starts + first for first, _ in zip(firsts, pages, strict=False))
            return
        chunk, sub = np.divmod(part.first_block % k + np.arange(count), k)
        starts = part.slots[chunk] * slot_stride
        yield from (starts + (sub * page + first) for first, page in zip(firsts, pages, strict=False))
