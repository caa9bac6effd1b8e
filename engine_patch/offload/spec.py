# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM's OffloadingConnector loads: an offload tier in CPU memory and, with `disk_path`, on disk.

With `peer_port` it also fetches chunks from other engines and lends them its own.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "HybridOffloadingSpec", "spec_module_path": "kvrouter.engine_patch.offload.spec",
        "cpu_bytes_to_use": 10000000000, "disk_path": "/var/cache/kv", "disk_bytes_to_use": 100000000000}}'

One object of it lives in the scheduler's process and one in each worker's.
Source: vLLM 0.32 and 0.33 v1/kv_offload/base.py OffloadingSpec.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig

from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity, GroupIdentity
from kvrouter.engine_patch.offload.disk.reader import DiskReader
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.manager import HybridOffloadingManager
from kvrouter.engine_patch.offload.memory.canonical import from_vllm
from kvrouter.engine_patch.offload.memory.region import Region, padded, shared_path
from kvrouter.engine_patch.offload.memory.slot_layout import SlotLayout
from kvrouter.engine_patch.offload.metrics import COUNTERS, GAUGES
from kvrouter.engine_patch.offload.peer.lender import PeerFacts
from kvrouter.engine_patch.offload.peer.peering import Peering, Slots
from kvrouter.engine_patch.offload.sampling import Sampling
from kvrouter.engine_patch.offload.settings import tier_settings
from kvrouter.engine_patch.offload.tiers.cpu_tier import CpuTier
from kvrouter.engine_patch.offload.tiers.guests import Guests
from kvrouter.engine_patch.offload.tiers.peer_tier import PeerTier
from kvrouter.engine_patch.offload.tiers.policy import make_policy
from kvrouter.engine_patch.offload.tiers.tiering import Tiering
from kvrouter.engine_patch.offload.worker import HybridOffloadingWorker, make_transfers
from kvrouter.events.patch.messages import PeerAddress

log = logging.getLogger("vllm.kvrouter.offload")

# Labels for the facts of the tiers that never change.
INFO_LABELS = ("cpu_chunks", "chunk_bytes", "eviction_policy", "disk", "disk_bytes")


class HybridOffloadingSpec(base.OffloadingSpec):  # type: ignore[misc]
    """The factory of both sides of the tiers, as vLLM's connector calls it."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Check the settings. Raise ValueError, with the change to make, for settings that are impossible."""
        super().__init__(config)
        self._settings = tier_settings(config.extra_config)
        self._ranks = config.parallel.world_size
        if config.worker_kv_bytes_per_block < 1:
            raise ValueError("vLLM does not report how many bytes a block of the KV cache has; is the cache empty?")
        # Bytes of one rank's part of a chunk. Only the worker knows how many of them a group needs; `SlotLayout` raises
        # there if that is more.
        self._rank_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self._chunk_bytes = self._rank_bytes * self._ranks
        self._num_slots = self._settings.cpu_bytes // padded(self._chunk_bytes)
        if self._num_slots < 1:
            raise ValueError(
                f"cpu_bytes_to_use is {self._settings.cpu_bytes}, less than one chunk of {padded(self._chunk_bytes)} bytes "
                f"({self.blocks_per_chunk} blocks, {self._ranks} ranks): raise it, or lower blocks_per_chunk"
            )
        # The memory of the slots for the threads of the disk and of the peers, which run in the scheduler's process.
        self._shared_region: Region | None = None
        self._peering: Peering | None = None
        self._manager: HybridOffloadingManager | None = None
        self._worker: HybridOffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, base.OffloadingMetricMetadata]:
        """Return the definitions of the tiers' metrics for vLLM's /metrics."""
        definitions: dict[str, base.OffloadingMetricMetadata] = {
            name: base.OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()
        }
        definitions |= {name: base.OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}
        return definitions

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of `vllm:kv_offload_config_info`, which vLLM has from 0.33 on."""
        return INFO_LABELS

    def _facts(self) -> dict[str, str | int]:
        settings = self._settings
        disk = "none" if settings.disk_folder is None else "read-only" if settings.disk_read_only else "read-write"
        values = (self._num_slots, self._chunk_bytes, settings.policy, disk, settings.disk_bytes)
        return dict(zip(INFO_LABELS, values, strict=True))

    def _token_bytes(self) -> int:
        """Return the bytes of KV cache for one token, of all groups and ranks; a part of a byte counts as one."""
        block_bytes = self.config.worker_kv_bytes_per_block * self._ranks
        return sum(-(-block_bytes // group.tokens_per_block) for group in self.config.groups)

    def get_manager(self) -> HybridOffloadingManager:
        """Return the scheduler's side, made at the first call.

        That call reads which chunks an earlier engine left on disk.
        """
        if self._manager is None:
            cpu = CpuTier(self._num_slots, make_policy(self._settings.policy, self._num_slots))
            disk = self._make_disk()
            peering = self._peering = self._make_peering()
            peers = guests = None
            if peering is not None:
                peers = PeerTier(peering.client, self._settings.peer_timeout_s, time.monotonic)
                if self._settings.peer_lends_disk:
                    guests = Guests(cpu, peering.max_lent_chunks, self._chunk_bytes)
            announce = self.kv_events_config.enable_kv_cache_events
            tiering = Tiering(cpu, disk, announce=announce, peers=peers, guests=guests)
            shared = disk is not None and disk.shared
            if peering is not None:
                peering.lend(tiering)
            sampling = Sampling(tiering, cpu, disk, peering)

            def peer_address() -> PeerAddress | None:
                if peering is None:
                    return None
                return peering.address(tiering.num_resets, self._token_bytes(), tiering.lends_disk)

            self._manager = HybridOffloadingManager(tiering, sampling, self._close, shared, self._facts(), peer_address)
            log.info(
                "kvrouter: %d chunks of %d bytes in CPU memory (%s)%s",
                self._num_slots,
                self._chunk_bytes,
                self._settings.policy,
                "" if disk is None else f", {disk.records} found in {self._settings.disk_folder}",
            )
        return self._manager

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> HybridOffloadingWorker:
        """Return this rank's side, made at the first call."""
        if self._worker is None:
            caches = from_vllm(kv_caches)
            layout = SlotLayout(caches.page_bytes, self.blocks_per_chunk, self._rank_bytes)
            region = self._region(self.config.parallel.rank)
            transfers = make_transfers(caches, layout, region)
            self._worker = HybridOffloadingWorker(transfers, self.blocks_per_chunk, region)
        return self._worker

    def _close(self, tiering: Tiering) -> None:
        # Readers get no loan of memory that is about to be released.
        if self._peering is not None:
            self._peering.stop_lending()
        tiering.close()
        if self._shared_region is not None:
            self._shared_region.close()

    def _region(self, rank: int | None) -> Region:
        """Return the memory of the slots.

        `rank` is None in the scheduler's process, whose threads read and write the bytes of all ranks.
        """
        settings = self._settings
        shared = settings.disk_folder is not None or settings.peer_port is not None or self._ranks > 1
        path = shared_path(self.config.engine_id, settings.shared_memory) if shared else None
        return Region.create_or_open(path, self._num_slots, self._chunk_bytes, self._ranks, rank)

    def _whole_region(self) -> Region:
        """Return the memory of all ranks' slots, for threads of the scheduler's process."""
        if self._shared_region is None:
            self._shared_region = self._region(None)
        return self._shared_region

    def _make_peering(self) -> Peering | None:
        settings = self._settings
        if settings.peer_port is None:
            return None
        region = self._whole_region()
        identity = self._identity()
        slots = Slots(region.address, self._num_slots, region.slot_bytes, self._chunk_bytes, region.slot)
        return Peering(
            slots,
            lambda: PeerFacts(identity.digest(), _hash_root()),
            identity.checksum,
            settings.peer_host,
            # Each data-parallel rank is an engine of its own, as in vLLM's p2p tier.
            settings.peer_port + self.config.parallel.data_parallel_index,
            settings.peer_key_file,
            settings.peer_list_file,
            log,
        )

    def _make_disk(self) -> DiskTier | DiskReader | None:
        settings = self._settings
        if settings.disk_folder is None:
            return None
        region = self._whole_region()
        # Slots that wait for the disk cannot be evicted, so most slots must not wait: a quarter may wait for reads, and
        # a quarter for writes.
        max_queued = max(1, self._num_slots // 4)
        if settings.disk_read_only:
            return DiskReader(
                settings.disk_folder, self._identity(), region.slot, settings.disk_threads, max_queued, log=log
            )
        return DiskTier(
            settings.disk_folder,
            self._identity(),
            self._chunk_bytes,
            settings.disk_bytes,
            region.slot,
            threads=settings.disk_threads,
            max_queued=max_queued,
            log=log,
        )

    def _identity(self) -> DiskIdentity:
        config = self.config
        parallel = config.parallel
        return DiskIdentity(
            model=config.model.name,
            dtype=config.model.dtype,
            groups=tuple(
                GroupIdentity(f"group {group.group_id}: {' '.join(group.layer_names)}", (), group.tokens_per_block)
                for group in config.groups
            ),
            blocks_per_chunk=self.blocks_per_chunk,
            hash_algorithm=f"{self.tokens_per_hash} tokens a hash",
            record_bytes=self._chunk_bytes,
            num_ranks=self._ranks,
            parallel=(
                f"tp={parallel.tp_size} pp={parallel.pp_size} pcp={parallel.pcp_size} dcp={parallel.dcp_size} "
                f"dp={parallel.data_parallel_index}/{parallel.data_parallel_size}"
            ),
            extra=(("kv_cache_layout", str(config.kv_cache_layout)), ("model files", _files(config.model.name))),
        )


def _hash_root() -> bytes:
    """Return the first parent hash, which vLLM chooses after the tiers are made; empty until then."""
    return bytes(getattr(kv_cache_utils, "NONE_HASH", b""))


def _files(model: str) -> str:
    """Return names, sizes and times of a model folder's files, which distinguish its weights from earlier ones.

    The text is empty for a model by name.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ""
    files = sorted((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in files)
