# SPDX-License-Identifier: Apache-2.0
"""Submits copies between the engine's KV cache on a CUDA device and slots in pinned memory.

The module is small, because it runs only on machines with such a device. The parts that it shares with the CPU copier,
places and plans, are tested everywhere. Only streams, events and vLLM's batched copies are left: `_custom_ops.
swap_blocks_batch` (0.32: cuMemcpyBatchAsync, or single copies on a driver that lacks it), and a Triton kernel for loads
of small pages (0.32 module `vllm.v1.kv_offload.cpu.swap_blocks_triton`), for which one descriptor a page is too much:
4.7 of 55 GB/s at 16 KiB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches
from kvrouter.engine_patch.offload.memory.copier import check_fits, check_within
from kvrouter.engine_patch.offload.memory.slot_layout import IdArray, Plan, SlotLayout

# Copies in words of 8 bytes, at most this many bytes at a time in each program, as vLLM's own tier does
# (0.32 module `vllm.v1.kv_offload.cpu.gpu_worker`, _select_swap_blocks_fn).
WORD_BYTES = 8
MAX_STEP_BYTES = 8_192


class CudaCopy:
    """A copy under way on a stream (`device_transfers.py`, DeviceCopy)."""

    def __init__(self, start: Any, end: Any, num_bytes: int, lists: Any) -> None:
        """Take the events around the copy, its bytes, and the lists of addresses, which must last as long as the copy."""
        self.num_bytes = num_bytes
        self._start, self._end, self._lists = start, end, lists

    def is_done(self) -> bool:
        """Return whether the copy has ended."""
        return bool(self._end.query())

    def wait(self) -> None:
        """Wait until the copy has ended; other threads continue."""
        self._end.synchronize()

    def seconds(self) -> float:
        """Return how long the copy took."""
        return float(self._start.elapsed_time(self._end)) / 1_000


class CudaCopier:
    """A copier with one stream for each direction beside the stream that computes, and one batched copy for each plan.

    PCIe carries both directions at full speed.
    """

    def __init__(self, caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor, *, is_pinned: bool) -> None:
        """Create the streams.

        Args:
            caches: The engine's caches.
            layout: The places of pages within a slot.
            slots: As for `CpuCopier`.
            is_pinned: Whether the slots' memory is pinned (`Region.pin`). If it is not, copies are slow, and submitting one
                may take as long as the copy.

        Raises:
            ImportError: vLLM has no batched copy.
            ValueError: The layout does not fit the caches or the slots.
        """
        # Imported here, so that importing this file needs no CUDA build.
        from vllm._custom_ops import swap_blocks_batch

        check_fits(caches, layout, slots)
        self._store = functools.partial(swap_blocks_batch, is_src_access_order_any=False)
        # Nothing on the device writes to the slots, so the driver may read them ahead.
        small = _small_page_copy(caches, layout, slots) if is_pinned else None
        self._load = small or functools.partial(swap_blocks_batch, is_src_access_order_any=True)
        self._layout = layout
        self._device = caches.tensors[0].tensor.device
        self._slots, self._slot_stride = slots, int(slots.stride(0))
        self._pages = [
            [(caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs] for refs in caches.group_refs
        ]
        self._store_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)

    def begin_store(self, plan: Plan) -> CudaCopy:
        """Submit a copy from the caches to slots, behind all work that the engine has queued so far.

        Raises IndexError for a block or slot that does not exist.
        """
        cache, slots, sizes = self._addresses(plan)
        return self._begin(self._store_stream, self._store, cache, slots, sizes)

    def begin_load(self, plan: Plan) -> CudaCopy:
        """Submit a copy from slots to the caches, behind all work that the engine has queued so far.

        That work may still have to zero the blocks that the load fills. Raises IndexError for a block or slot that does
        not exist.
        """
        cache, slots, sizes = self._addresses(plan)
        return self._begin(self._load_stream, self._load, slots, cache, sizes)

    def _begin(
        self, stream: Any, copy: Callable[..., None], source: IdArray, target: IdArray, sizes: IdArray
    ) -> CudaCopy:
        lists = [torch.from_numpy(numbers) for numbers in (source, target, sizes)]
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record(stream)
                if len(sizes):
                    copy(*lists)
                end.record(stream)
        return CudaCopy(start, end, int(sizes.sum()), lists)

    def _addresses(self, plan: Plan) -> tuple[IdArray, IdArray, IdArray]:
        """Return three arrays of (pages,): addresses in the cache, addresses in the slots, and bytes.

        Raises IndexError for a block or slot that does not exist, because the device would write to any address.
        """
        empty = np.empty(0, np.int64)
        cache, slots, sizes = [empty], [empty], [empty]
        for part in plan:
            check_within(part.slots, self._slots.shape[0], "slot")
            all_offsets = self._layout.page_offsets(part, self._slot_stride)
            for (tensor, page_bytes), offsets in zip(self._pages[part.group], all_offsets, strict=True):
                check_within(part.block_ids, tensor.shape[0], "block")
                cache.append(tensor.data_ptr() + part.block_ids * tensor.stride(0))
                slots.append(self._slots.data_ptr() + offsets)
                sizes.append(np.full(len(offsets), page_bytes, np.int64))
        return np.concatenate(cache), np.concatenate(slots), np.concatenate(sizes)


def _small_page_copy(caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor) -> Callable[..., None] | None:
    """Return the kernel for loads of these pages, or None where the driver's batched copy is better or must be used.

    The kernel reads the slots' memory, which must be pinned, from the device, and copies whole words.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.kv_offload.cpu.swap_blocks_triton import THRESHOLD_BYTES, swap_blocks_batch
    except ImportError:
        # vLLM has the kernel from 0.23 on.
        return None
    pages = [page_bytes for group in layout.groups for page_bytes in group]
    # A kernel for ROCm or XPU could not read the slots.
    if not HAS_TRITON or not current_platform.is_cuda() or max(pages) >= THRESHOLD_BYTES:
        return None
    places = [slots, *[page.tensor for page in caches.tensors]]
    if any(size % WORD_BYTES for size in (*pages, *[n for t in places for n in (t.data_ptr(), t.stride(0))])):
        return None
    return functools.partial(swap_blocks_batch, bytes_per_chunk=step_bytes(max(pages)))


def step_bytes(page_bytes: int) -> int:
    """Return the bytes that one program of the kernel copies at a time: a power of two that holds a page, if it may."""
    return min(1 << (page_bytes - 1).bit_length(), MAX_STEP_BYTES)
