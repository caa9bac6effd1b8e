# SPDX-License-Identifier: Apache-2.0
"""The router's own prediction from SGLang's own events: its decoder, ingest, mirror, hashes and hit rule."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.stream_items import Batch, StreamItem, fingerprint
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec, Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.sglang.tree_oracle import TreePrompt

WORKER = WorkerKey("m", "w")


def full_attention(page: int, group_idx: int | None = None) -> CatalogSpec:
    """Return the catalog that a user registers for a model with full attention alone."""
    return CatalogSpec(groups=(GroupSpec(group_idx, "full_attention", page),))


class StockPredictor:
    """A router's view of one worker, followed by the engine's own events."""

    def __init__(self, catalog: CatalogSpec | None) -> None:
        epochs = itertools.count()
        registration = Registration(WORKER, events="tcp://127.0.0.1:5557", engine="sglang", catalog=catalog)
        self.ingest = Ingest(registration, seed=None, decoder=BatchDecoder(), new_epoch=lambda: f"e{next(epochs)}")
        self.ingest.follow_stock()

    def take(self, item: StreamItem) -> None:
        self.ingest.apply(item, 0.0)

    def take_payload(self, seq: int, payload: bytes) -> None:
        self.take(Batch(seq, payload, fingerprint(payload), replayed=False))

    def hit(self, prompt: TreePrompt) -> Hit:
        profile, held = self.ingest.profile, self.ingest.held
        mirror = Mirror(1 << 24)
        mirror.begin_epoch(WORKER, "e")
        for place in held.blocks.places:
            hashes = held.blocks.hashes(place)
            if len(hashes):
                mirror.add(WORKER, place, hashes)
        view = WorkerView(
            WORKER,
            None,
            self.ingest.state,
            self.ingest.state is StreamState.LIVE and profile.identity.explained,
            "",
            "e",
            profile.catalog,
            profile.identity.scheme,
            profile.spec.lora_paths,
        )
        question = Question(
            "m",
            len(prompt.tokens),
            token_ids=np.array(prompt.tokens, np.int64),
            lora_name=None if prompt.lora is None else f"name of {prompt.lora}",
            cache_salt=prompt.salt,
        )
        (hit,) = Matcher(mirror, SegmentMemory(0)).match(question, HashPlans.build(mirror, [view]))
        return hit

    @property
    def why_not(self) -> str:
        """The reason why the worker's blocks earn no credit, or ""."""
        return self.ingest.profile.catalog.problem or ""


def positional(events: list[Any]) -> list[list[Any]]:
    """Return events in SGLang's form before they were maps (up to 0.5.9): arrays of the fields up to the medium."""
    fields = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    arrays = []
    for event in events:
        names = [name for name in fields if hasattr(event, name)]
        arrays.append([type(event).__name__, *(getattr(event, name) for name in names)])
    return arrays
