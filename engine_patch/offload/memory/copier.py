# SPDX-License-Identifier: Apache-2.0
"""Copies blocks between the engine's KV cache in main memory and slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches
from kvrouter.engine_patch.offload.memory.slot_layout import IdArray, Plan, SlotLayout

# (rows, 1) opaque items of one page each; or (rows, bytes of a page) if pages are copied one by one.
PageArray = npt.NDArray[Any]

# Bytes that are gathered before they are scattered: they stay in a core's own cache, so that memory is read and written
# once. 64 to 512 KiB were alike; all at once ran at half the speed, torch's index_select and index_copy_ at 0.4 to 0.75
# of it.
BATCH_BYTES = 256 * 2**10
# From this size on, a page is copied directly to its place: a fifth faster, as the share of Python's work for each page
# is then small. Half of this size: alike.
DIRECT_BYTES = 64 * 2**10


class Copier(Protocol):
    """A copier of blocks between caches in main memory and slots.

    Its copies return the bytes copied when they are done, and raise if they fail.
    """

    def store(self, plan: Plan) -> int:
        """Copy blocks from the caches to slots, and return the bytes copied."""
        ...

    def load(self, plan: Plan) -> int:
        """Copy blocks from slots to the caches, and return the bytes copied."""
        ...


class CpuCopier:
    """A copier for caches in main memory: numpy alone, one core.

    torch would take the threads with which the engine computes. A copy gathers some pages and scatters them, as many at
    a time as fit into a core's cache, and copies large pages one by one, so that Python's work grows with batches of
    bytes, not with blocks. The interpreter is free while a batch is copied, so that the engine's thread can continue.
    """

    def __init__(self, caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor) -> None:
        """Prepare views of the caches and of the slots' memory.

        Args:
            caches: The engine's caches.
            layout: The places of pages within a slot.
            slots: int8 (num_slots, bytes of a rank), rows may be apart, as `Region.rank_tensor` returns them.

        Raises:
            ValueError: The layout is not that of the caches, or takes more bytes than the slots have.
        """
        check_fits(caches, layout, slots)
        self._layout = layout
        self._num_slots, self._slot_stride = int(slots.shape[0]), int(slots.stride(0))
        # For each ref of each group: the cache's pages by block, and the slots' memory by byte, both as pages.
        self._pages: list[list[PageArray]] = []
        self._places: list[list[PageArray]] = []
        memory = _bytes(slots)
        for refs in caches.group_refs:
            self._pages.append([_pages(caches.tensors[r.tensor_idx].tensor, r.page_size_bytes) for r in refs])
            self._places.append([_places(memory, ref.page_size_bytes) for ref in refs])

    def store(self, plan: Plan) -> int:
        """Copy blocks from the caches to slots.

        Nothing is copied if it raises.

        Raises:
            IndexError: A block or a slot does not exist.
            ValueError: A part does not have one slot for each chunk.
        """
        return sum(_copy(pages, blocks, places, offsets) for pages, places, blocks, offsets in self._pieces(plan))

    def load(self, plan: Plan) -> int:
        """Copy blocks from slots to the caches; raises the same errors as `store`."""
        return sum(_copy(places, offsets, pages, blocks) for pages, places, blocks, offsets in self._pieces(plan))

    def _pieces(self, plan: Plan) -> Iterator[tuple[PageArray, PageArray, IdArray, IdArray]]:
        """Yield pages, places, and the indices into both, for each ref of each part."""
        for part in plan:
            check_within(part.slots, self._num_slots, "slot")
            for pages in self._pages[part.group]:
                check_within(part.block_ids, len(pages), "block")
        # All offsets are computed first, so that errors are found before anything is copied.
        all_offsets = [list(self._layout.page_offsets(part, self._slot_stride)) for part in plan]
        for part, ref_offsets in zip(plan, all_offsets, strict=True):
            refs = zip(self._pages[part.group], self._places[part.group], ref_offsets, strict=True)
            for pages, places, offsets in refs:
                yield pages, places, part.block_ids, offsets


def _copy(source: PageArray, chosen: IdArray, target: PageArray, places: IdArray) -> int:
    """Assign `target[places] = source[chosen]`, both (n,), in batches, and return the bytes copied."""
    page_bytes: int = source.shape[1] * source.itemsize
    if page_bytes >= DIRECT_BYTES:
        for index, place in zip(chosen.tolist(), places.tolist(), strict=True):
            target[place] = source[index]
    else:
        step = max(1, BATCH_BYTES // page_bytes)
        for start in range(0, len(chosen), step):
            target[places[start : start + step]] = source[chosen[start : start + step]]
    return len(chosen) * page_bytes


def check_within(numbers: IdArray, count: int, what: str) -> None:
    """Raise IndexError for a number outside 0 to count - 1, because a negative one would be counted from the end."""
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} {int(numbers.min())} to {int(numbers.max())} are not all among 0 to {count - 1}")


def check_fits(caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor) -> None:
    """Raise ValueError if the layout's pages are not those of the caches, or its slots are larger than these slots."""
    if layout.groups != caches.page_bytes:
        raise ValueError(
            f"the slots are laid out for pages of {layout.groups} bytes, the caches have {caches.page_bytes}"
        )
    if slots.shape[1] < layout.slot_bytes:
        raise ValueError(f"a rank has {slots.shape[1]} bytes of a slot, the layout takes {layout.slot_bytes}")


def _pages(tensor: torch.Tensor, page_bytes: int) -> PageArray:
    """Return the tensor's rows as pages, as a view of its memory."""
    return _items(tensor.numpy()[:, :page_bytes])


def _bytes(slots: torch.Tensor) -> npt.NDArray[np.int8]:
    """Return a view of (bytes,) from the first slot's first byte to the last slot's last."""
    size = (slots.shape[0] - 1) * slots.stride(0) + slots.shape[1]
    flat: npt.NDArray[np.int8] = slots.as_strided((size,), (1,)).numpy()
    return flat


def _places(memory: npt.NDArray[np.int8], page_bytes: int) -> PageArray:
    """Return overlapping views of one page each, for every byte at which a page fits: view i begins at byte i."""
    count = len(memory) - page_bytes + 1
    return _items(np.lib.stride_tricks.as_strided(memory, (count, page_bytes), (1, 1)))


def _items(rows: npt.NDArray[np.int8]) -> PageArray:
    """Return rows of (n, bytes of a page) as a PageArray.

    The result has two dimensions in any case, because numpy holds the interpreter while it indexes fewer than 500 items
    of a one-dimensional array.
    """
    page_bytes = rows.shape[1]
    return rows if page_bytes >= DIRECT_BYTES else rows.view(f"V{page_bytes}")
