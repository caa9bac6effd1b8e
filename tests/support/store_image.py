# SPDX-License-Identifier: Apache-2.0
"""A model of the state that Redis holds of one worker, which applies commits as Redis does."""

from __future__ import annotations

import random

import numpy as np

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.matching.mirror import Mirror
from tests.support.model_engine import Held

WORKER = WorkerKey("m", "w")
MIRROR_BYTES = 1 << 24


class Misled(AssertionError):
    """A violated invariant of the router; the message names it."""


class StoreImage:
    """The worker's state in Redis, and the mirror that follows it."""

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.seq: int | None = None
        self.places: dict[Place, set[int]] = {}
        self.copies: dict[tuple[Place, int], int] = {}
        self.meta: dict[str, bytes] = {}
        # Start time of the engine's process, as far as the router that follows it knows.
        self.start_s: float | None = None
        self.mirror = Mirror(MIRROR_BYTES)

    def commit(self, flush: PendingCommit, start_s: float | None) -> None:
        if flush.opens_epoch:
            if flush.epoch == self.epoch:
                raise Misled(f"epoch {flush.epoch} is opened twice")
            self.epoch, self.seq, self.places, self.copies, self.meta = flush.epoch, None, {}, {}, {}
            self.mirror.begin_epoch(WORKER, flush.epoch)
        if flush.epoch != self.epoch:
            raise Misled(f"a commit of epoch {flush.epoch} after {self.epoch}")
        self.meta |= flush.meta
        self.start_s = start_s
        if flush.seqs is None:
            if flush.changes or flush.copies:
                raise Misled("changes without a batch are not committed")
            return
        if self.seq is not None and flush.seqs[0] != self.seq + 1:
            raise Misled(f"batches {flush.seqs} do not follow {self.seq}")
        self.seq = flush.seqs[1]
        for change in flush.changes:
            held = self.places.setdefault(change.place, set())
            added, removed = set(change.added.tolist()), set(change.removed.tolist())
            if len(added) != len(change.added) or len(removed) != len(change.removed):
                raise Misled("a change names a block twice")
            if added & held or removed - held:
                raise Misled("a change is none")
            self.places[change.place] = (held - removed) | added
            self.mirror.discard(WORKER, change.place, change.removed)
            self.mirror.add(WORKER, change.place, change.added)
        for place, block, count in flush.copies:
            if count > 1:
                self.copies[place, block] = count
            else:
                self.copies.pop((place, block), None)

    def residency(self) -> dict[Place, set[int]]:
        return {place: held for place, held in self.places.items() if held}

    def arrays(self) -> dict[Place, np.ndarray]:
        return {place: np.array(sorted(held), np.uint64) for place, held in self.places.items()}

    def credited(self) -> Held:
        worker_index = self.mirror.worker(WORKER)
        if worker_index is None:
            return {}
        hashes = {place: frozenset(self.mirror.held(WORKER, place).tolist()) for place in worker_index.places}
        return {place: held for place, held in hashes.items() if held}

    def spoil(self, rng: random.Random) -> str:
        """Write garbage into the worker's keys, as another program might, and return the name of the changed field."""
        garbage = rng.choice([b"", b"{", b"\xff\xfe", b"-1", b"[]", b'{"algo":"md5"}', b"9" * 40])
        field = rng.choice(["learned", "scheme", "fingerprint", "gaps", "declared", "report_epoch", "copies"])
        if field == "copies":
            place = rng.choice([*self.places, Place(0, "GPU")])
            self.copies[place, rng.randrange(1, 9)] = rng.choice([0, -3, 70_000, 1 << 70])
        else:
            self.meta[field] = garbage
        return field
