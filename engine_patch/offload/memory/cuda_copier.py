# SPDX-License-Identifier: Apache-2.0
"""Copies blocks between the engine's KV cache on a CUDA device and slots in pinned memory.

The module is small, because it runs only on machines with such a device. The parts that it shares with the CPU copier,
places and plans, are tested everywhere. Only streams, events and vLLM's batched copy are left
(_custom_ops.swap_blocks_batch, 0.32: cuMemcpyBatchAsync, or single copies on a driver that lacks it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches
from kvrouter.engine_patch.offload.memory.copier import check_fits, check_within
from kvrouter.engine_patch.offload.memory.slot_layout import IdArray, Plan, SlotLayout


class CudaCopier:
    """A copier with one stream for each direction beside the stream that computes, and one batched copy for each plan.

    One thread for each direction calls it and waits for the copy; the engine's thread never waits.
    """

    # One lane for each direction, because PCIe carries both at full speed.
    lanes = 2

    def __init__(self, caches: CanonicalCaches, layout: SlotLayout, slots: torch.Tensor) -> None:
        """Create the streams.

        Args:
            caches: The engine's caches.
            layout: The places of pages within a slot.
            slots: As for `CpuCopier`; if they are not pinned (`Region.pin`), copies are slow.

        Raises:
            ImportError: vLLM has no batched copy.
            ValueError: The layout does not fit the caches or the slots.
        """
        # Imported here, so that importing this file needs no CUDA build.
        from vllm._custom_ops import swap_blocks_batch

        check_fits(caches, layout, slots)
        self._copy = swap_blocks_batch
        self._layout = layout
        self._device = caches.tensors[0].tensor.device
        self._slots, self._slot_stride = slots, int(slots.stride(0))
        self._pages = [
            [(caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs] for refs in caches.group_refs
        ]
        self._store_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)

    def fence(self) -> Any:
        """Return an event that occurs once the device has done all work that the engine has queued so far.

        Loads wait for it too, because that work may still have to zero the blocks that a load fills.
        """
        return torch.cuda.current_stream(self._device).record_event()

    def store(self, plan: Plan, fence: Any) -> int:
        """Copy blocks from the caches to slots, and return the bytes copied.

        Raises IndexError for a block or slot that does not exist.
        """
        cache, slots, sizes = self._addresses(plan)
        return self._run(self._store_stream, fence, cache, slots, sizes, any_order=False)

    def load(self, plan: Plan, fence: Any) -> int:
        """Copy blocks from slots to the caches, and return the bytes copied.

        Raises IndexError for a block or slot that does not exist.
        """
        cache, slots, sizes = self._addresses(plan)
        # Nothing on the device writes to the slots, so the driver may read them ahead.
        return self._run(self._load_stream, fence, slots, cache, sizes, any_order=True)

    def _run(
        self, stream: Any, fence: Any, source: IdArray, target: IdArray, sizes: IdArray, *, any_order: bool
    ) -> int:
        if not len(sizes):
            return 0
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(fence)
            lists = [torch.from_numpy(numbers) for numbers in (source, target, sizes)]
            self._copy(*lists, is_src_access_order_any=any_order)
            done = stream.record_event()
        # This wait releases the interpreter.
        done.synchronize()
        return int(sizes.sum())

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
