# SPDX-License-Identifier: Apache-2.0
"""Copies blocks between the engine's KV cache and slots, in main memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches
from kvrouter.engine_patch.offload.memory.slot_layout import IdArray, Plan, SlotLayout

# (rows, 1) opaque items of a page each; or (rows, bytes of a page) where pages are copied one by one.
PageArray = npt.NDArray[Any]

# What is gathered before it is scattered: it stays in a core's own cache, so that memory is read and written once. 64
# to 512 KiB were alike; all at once ran at half the speed, torch's index_select and index_copy_ at 0.4 to 0.75 of it.
BATCH_BYTES = 256 * 2**10
# From this size on a page is copied where it lies: a fifth faster, as what Python does for each then weighs little.
# Half of it: alike.
DIRECT_BYTES = 64 * 2**10


class Copier(Protocol):
    """store: cache to slots, load: slots to cache. Both return the bytes copied when the copy is done, and raise when
    it is not."""

    # How many copies make sense at a time: one thread each.
    lanes: int

    def fence(self) -> Any:
        """What a copy that is submitted now has to wait for; called by the thread that computes."""
        ...

    def store(self, plan: Plan, fence: Any) -> int: ...

    def load(self, plan: Plan, fence: Any) -> int: ...


class CpuCopier:
    """For caches in main memory: numpy alone, one core. torch would take the threads that the engine computes with.

    A copy gathers some pages and scatters them, as many at a time as fit into a core's cache, and large pages one by
    one: Python counts batches of bytes, not blocks. The interpreter is free while one is copied, so that the engine's
    thread can go on.
    """

    lanes = 1

    def __init__(self, caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor) -> None:
        """slots: int8 (num_slots, bytes of a rank), rows may lie apart, as Region.rank_tensor gives them.

        Raises ValueError when layout is not that of the caches or its slots are larger than these."""
        check_fits(caches, layout, slots)
        self._layout = layout
        self._num_slots, self._slot_stride = int(slots.shape[0]), int(slots.stride(0))
        # Per group, per ref: the cache's pages by block, and the slots' memory by byte, both as pages.
        self._pages: list[list[PageArray]] = []
        self._places: list[list[PageArray]] = []
        memory = _bytes(slots)
        for refs in caches.group_refs:
            self._pages.append([_pages(caches.tensors[r.tensor_idx].tensor, r.page_size_bytes) for r in refs])
            self._places.append([_places(memory, ref.page_size_bytes) for ref in refs])

    def fence(self) -> None:
        """Nothing: what the engine computed on the CPU is in memory when it goes on."""

    def store(self, plan: Plan, fence: None = None) -> int:
        """Raises IndexError for a block or a slot that is not there, ValueError for a part that has not one slot for
        each chunk; both before anything is copied."""
        return sum(_copy(pages, blocks, places, offsets) for pages, places, blocks, offsets in self._pieces(plan))

    def load(self, plan: Plan, fence: None = None) -> int:
        """As store, the other way."""
        return sum(_copy(places, offsets, pages, blocks) for pages, places, blocks, offsets in self._pieces(plan))

    def _pieces(self, plan: Plan) -> Iterator[tuple[PageArray, PageArray, IdArray, IdArray]]:
        """For each ref of each part: pages and places, and which of them."""
        for part in plan:
            check_within(part.slots, self._num_slots, "slot")
            for pages in self._pages[part.group]:
                check_within(part.block_ids, len(pages), "block")
        # All of them first: what is wrong is found before anything is copied.
        all_offsets = [list(self._layout.page_offsets(part, self._slot_stride)) for part in plan]
        for part, ref_offsets in zip(plan, all_offsets, strict=True):
            refs = zip(self._pages[part.group], self._places[part.group], ref_offsets, strict=True)
            for pages, places, offsets in refs:
                yield pages, places, part.block_ids, offsets


def _copy(source: PageArray, chosen: IdArray, target: PageArray, places: IdArray) -> int:
    """target[places] = source[chosen], both (n,), in batches; the bytes copied."""
    page_bytes: int = source.shape[1] * source.itemsize
    if page_bytes >= DIRECT_BYTES:
        for one, place in zip(chosen.tolist(), places.tolist(), strict=True):
            target[place] = source[one]
    else:
        step = max(1, BATCH_BYTES // page_bytes)
        for start in range(0, len(chosen), step):
            target[places[start : start + step]] = source[chosen[start : start + step]]
    return len(chosen) * page_bytes


def check_within(numbers: IdArray, count: int, what: str) -> None:
    """Raises IndexError for a number that is not 0 to count - 1: a negative one would be a place counted from the
    end."""
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} {int(numbers.min())} to {int(numbers.max())} of {count}")


def check_fits(caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor) -> None:
    """Raises ValueError when the layout's pages are not those of the caches, or its slots are larger than these."""
    if layout.groups != caches.page_bytes:
        raise ValueError(
            f"the slots are laid out for pages of {layout.groups} bytes, the caches have {caches.page_bytes}"
        )
    if slots.shape[1] < layout.slot_bytes:
        raise ValueError(f"a rank has {slots.shape[1]} bytes of a slot, the layout takes {layout.slot_bytes}")


def _pages(tensor: torch.Tensor, page_bytes: int) -> PageArray:
    """The tensor's rows as pages, over its memory."""
    return _items(tensor.numpy()[:, :page_bytes])


def _bytes(slots: torch.Tensor) -> npt.NDArray[np.int8]:
    """(bytes,) from the first slot's first byte to the last slot's last."""
    size = (slots.shape[0] - 1) * slots.stride(0) + slots.shape[1]
    flat: npt.NDArray[np.int8] = slots.as_strided((size,), (1,)).numpy()
    return flat


def _places(memory: npt.NDArray[np.int8], page_bytes: int) -> PageArray:
    """A page at every byte of memory: they overlap, and a page's number is where it begins."""
    count = len(memory) - page_bytes + 1
    return _items(np.lib.stride_tricks.as_strided(memory, (count, page_bytes), (1, 1)))


def _items(rows: npt.NDArray[np.int8]) -> PageArray:
    """rows: (n, bytes of a page). Two dimensions in any case: numpy holds the interpreter while it indexes fewer than
    500 items of an array of one."""
    page_bytes = rows.shape[1]
    return rows if page_bytes >= DIRECT_BYTES else rows.view(f"V{page_bytes}")
