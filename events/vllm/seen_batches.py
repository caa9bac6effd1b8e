# SPDX-License-Identifier: Apache-2.0
"""The last batches by seq and fingerprint, to distinguish a duplicate from another life. Pure."""

from __future__ import annotations

from array import array

from kvrouter.events.vllm.stream_items import Batch, ResumePoint

REMEMBERED_BATCHES = 4096


class SeenBatches:
    """A memory of the last batch for each seq modulo REMEMBERED_BATCHES."""

    def __init__(self) -> None:
        self._seqs = array("q", [-1]) * REMEMBERED_BATCHES
        self._fingerprints = array("Q", [0]) * REMEMBERED_BATCHES

    def add(self, batch: Batch | ResumePoint) -> None:
        """Remember a batch."""
        slot = batch.seq % REMEMBERED_BATCHES
        self._seqs[slot] = batch.seq
        self._fingerprints[slot] = batch.fingerprint

    def has(self, batch: Batch) -> bool:
        """Return whether exactly this batch is remembered."""
        slot = batch.seq % REMEMBERED_BATCHES
        return self._seqs[slot] == batch.seq and self._fingerprints[slot] == batch.fingerprint
