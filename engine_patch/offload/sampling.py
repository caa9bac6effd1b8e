# SPDX-License-Identifier: Apache-2.0
"""Reads the values of the metrics in `metrics.py` from the tiers."""

from __future__ import annotations

from kvrouter.engine_patch.offload.disk.reader import DiskReader
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.metrics import PREFIX, Sample
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peering import Peering
from kvrouter.engine_patch.offload.tiers.cpu_tier import CpuTier
from kvrouter.engine_patch.offload.tiers.tiering import Tiering


class Sampling:
    """A callable that returns a sample of the tiers' metrics."""

    def __init__(
        self, tiering: Tiering, cpu: CpuTier, disk: DiskTier | DiskReader | None, peering: Peering | None = None
    ) -> None:
        self._tiering, self._cpu, self._disk, self._peering = tiering, cpu, disk, peering

    def __call__(self) -> Sample:
        """Return the present values."""
        usage, counts = self._cpu.usage, self._tiering.counts
        chunks = usage.ready + usage.writing
        gauges: dict[str, float] = {"cpu_chunks": chunks, "cpu_usage_perc": chunks / usage.num_slots}
        counters = {
            "stores_refused": counts.stores_refused,
            "promotions": counts.promoted,
            "promotions_refused": counts.promotions_refused,
            "promotions_failed": counts.promotions_failed,
            "writes_skipped": counts.writes_skipped,
            "resets": counts.resets,
            "handed_over": counts.handed_over,
        }
        disk = self._disk
        if disk is not None:
            gauges |= {
                "disk_chunks": disk.records,
                "disk_bytes": disk.records * disk.record_bytes,
                "disk_pending": disk.pending,
                "disk_off": float(disk.off),
            }
            counters |= {
                "disk_written_bytes": disk.counters.written_bytes,
                "disk_read_bytes": disk.counters.read_bytes,
                "disk_errors": disk.counters.errors,
                "disk_corrupt": disk.counters.corrupt,
                "disk_evicted": disk.counters.evicted,
            }
        peers = self._tiering.peers
        if peers is not None:
            counters |= {"peer_pulled": peers.pulled}
            counters |= {f"peer_miss_{miss.value}": peers.misses[miss] for miss in PeerMiss}
        if self._peering is not None:
            lent = self._peering.counts
            counters |= {
                "peer_lent": lent.lent,
                "peer_lent_from_disk": lent.lent_from_disk,
                "peer_disk_failed": lent.disk_failed,
                "peer_disk_late": lent.disk_late,
                "peer_expired_loans": lent.expired_loans,
                "peer_refused_readers": lent.refused_readers,
                "peer_bad_messages": lent.bad_messages,
            }
        return Sample(
            {PREFIX + name: value for name, value in gauges.items()},
            {PREFIX + name: value for name, value in counters.items()},
        )
