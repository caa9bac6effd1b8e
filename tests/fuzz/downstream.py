# SPDX-License-Identifier: Apache-2.0
"""The stages after an `Ingest`, for fuzzing: log entries, the mirror and an answer; and a recount of the blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvrouter.contract.tiers import MEDIA
from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.copy_counts import MAX_COPIES
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.residency import Residency
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.index.store.log_entry import EntryKind, entry_fields, parse_entry
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import CREDITED

ASKED_TOKENS = 130
BUDGET_BYTES = 1 << 20

Copies = dict[Place, Counter[int]]


class Recount:
    """An oracle that counts the copies of every block by place in a slow and obvious way."""

    def __init__(self) -> None:
        self.copies: Copies = {}

    def count(self, place: Place, hashes: list[int], step: int) -> None:
        held = self.copies.setdefault(place, Counter())
        for block_hash in hashes:
            held[block_hash] += step
            if held[block_hash] <= 0:
                del held[block_hash]

    def clear(self, medium: str | None, *, group_idx: int | None = None, ownership: str | None = None) -> None:
        """Forget all blocks of this medium, group and owner; None stands for all of them."""
        for place, held in self.copies.items():
            chosen = medium in (None, place.medium) and group_idx in (None, place.group_idx)
            if chosen and ownership in (None, place.ownership):
                held.clear()

    def forget(self) -> None:
        self.copies = {}

    def replace(self, copies: Copies) -> None:
        self.copies = {
            place: Counter({h: min(n, MAX_COPIES) for h, n in held.items()}) for place, held in copies.items()
        }

    def sums(self) -> dict[Place, tuple[int, int, int]]:
        return {
            place: (len(held), sum(held.values()), sum(held) % 2**64) for place, held in self.copies.items() if held
        }

    def blocks(self) -> dict[Place, set[int]]:
        return {place: set(held) for place, held in self.copies.items() if held}

    def compare(self, blocks: Residency) -> None:
        sums = {place: (total.blocks, total.copies, total.digest) for place, total in blocks.sums().items()}
        assert sums == self.sums(), "the counts differ from a recount"


class Downstream:
    """The log, the mirror and the answers of one worker, fed by its `Ingest`."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._mirror = Mirror(BUDGET_BYTES)
        self._mirror.begin_epoch(registration.worker, "")
        self._commits = 0

    def flush(self, ingest: Ingest, recount: Recount) -> None:
        """Apply one commit to the mirror through the bytes of its log entry, and compare it with the recount."""
        flush = ingest.held.take()
        if flush is None:
            return
        worker, mirror = self._registration.worker, self._mirror
        if flush.opens_epoch:
            mirror.begin_epoch(worker, flush.epoch)
        if flush.seqs is None:
            assert not flush.changes, "changes that no commit would carry"
            return
        assert flush.seqs[0] <= flush.seqs[1]
        self._commits += 1
        fields = entry_fields(
            worker, EntryKind.COMMIT, self._commits, flush.epoch, flush.seqs, flush.changes, flush.meta
        )
        entry = parse_entry(worker, b"1-1", fields)
        worker_index = mirror.worker(worker)
        assert worker_index is not None
        assert worker_index.epoch == entry.epoch, "a commit of an epoch that was not opened"
        for change in entry.changes:
            mirror.discard(worker, change.place, change.removed)
            mirror.add(worker, change.place, change.added)
        held = {place: set(mirror.held(worker, place).tolist()) for place in worker_index.places}
        wanted = {place: blocks for place, blocks in recount.blocks().items() if place.medium in MEDIA}
        assert {place: blocks for place, blocks in held.items() if blocks} == wanted, "the mirror shows something else"

    def ask(self, ingest: Ingest) -> None:
        """Check that the worker can be shown and queried in any state, so that a query of its model cannot fail."""
        _ = (
            ingest.state,
            ingest.reason,
            ingest.profile.catalog.as_dict(),
            ingest.held.blocks.counts(),
            ingest.profile.identity.label,
        )
        view = WorkerView(
            worker=self._registration.worker,
            url=None,
            state=ingest.state,
            credited=ingest.state in CREDITED,
            reason=ingest.reason,
            epoch=ingest.held.epoch,
            catalog=ingest.profile.catalog,
            scheme=ingest.profile.identity.scheme if ingest.profile.identity.explained else None,
            lora_paths=ingest.profile.spec.lora_paths,
        )
        plans = HashPlans.build(self._mirror, [view])
        matcher = Matcher(self._mirror, SegmentMemory(0))
        prompts: tuple[dict[str, Any], ...] = (
            {"token_ids": np.arange(ASKED_TOKENS, dtype=np.int64)},
            {"block_hashes": np.arange(1, 11, dtype=np.uint64)},
        )
        for prompt in prompts:
            (hit,) = matcher.match(Question("m", ASKED_TOKENS, explain=True, **prompt), plans)
            assert hit.on_gpu >= 0 and hit.tokens < ASKED_TOKENS and list(hit.by_tier) == sorted(hit.by_tier)
