# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of one rank's copies: the OffloadingWorker to which its connector submits transfers.

Source: vLLM 0.32 and 0.33 v1/kv_offload/base.py OffloadingWorker, offloading/worker.py.
"""

from __future__ import annotations

from vllm.v1.kv_offload import base

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches
from kvrouter.engine_patch.offload.memory.copier import CpuCopier
from kvrouter.engine_patch.offload.memory.device_transfers import DeviceTransfers
from kvrouter.engine_patch.offload.memory.region import Region
from kvrouter.engine_patch.offload.memory.slot_layout import Plan, SlotLayout, make_plan
from kvrouter.engine_patch.offload.memory.transfers import Transfers
from kvrouter.engine_patch.offload.slots import SlotsSpec


def make_transfers(caches: CanonicalCaches, layout: SlotLayout, region: Region) -> Transfers | DeviceTransfers:
    """Return the copies of the device that holds the caches; pins the region for a CUDA device."""
    if any(page.tensor.is_cuda for page in caches.tensors):
        from kvrouter.engine_patch.offload.memory.cuda_copier import CudaCopier

        is_pinned = region.pin()
        return DeviceTransfers(CudaCopier(caches, layout, region.rank_tensor(), is_pinned=is_pinned))
    return Transfers(CpuCopier(caches, layout, region.rank_tensor()))


class HybridOffloadingWorker(base.OffloadingWorker):  # type: ignore[misc]
    """One rank's side of the tiers, called in the worker's thread, which never makes a copy itself."""

    def __init__(self, transfers: Transfers | DeviceTransfers, blocks_per_chunk: int, region: Region) -> None:
        self._transfers = transfers
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region

    def submit_store(self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: SlotsSpec) -> bool:
        """Queue a copy from the cache to slots, and return True."""
        self._transfers.submit_store(job_id, self._plan(src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: SlotsSpec, dst_spec: base.GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Queue a copy from slots to the cache, and return True.

        `expedited` (from vLLM 0.33 on) needs no action: vLLM waits for such a load next, and awaited copies come first
        anyway.
        """
        self._transfers.submit_load(job_id, self._plan(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[base.TransferResult]:
        """Return the transfers that ended since the last call."""
        return [
            base.TransferResult(job_id, ok, num_bytes, seconds)
            for job_id, ok, num_bytes, seconds in self._transfers.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended, with or without success."""
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """End the copies and release the memory."""
        self._transfers.close()
        self._region.close()

    def _plan(self, blocks: base.GPULoadStoreSpec, slots: SlotsSpec) -> Plan:
        return make_plan(
            blocks.block_ids, blocks.group_sizes, blocks.block_indices, slots.slots, self._blocks_per_chunk
        )
