# SPDX-License-Identifier: Apache-2.0
"""Events of a stock stream, and an `Ingest` that they are applied to."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.codec import BatchDecoder, encode_batch
from kvrouter.events.vllm.stream_items import Batch, Connected, fingerprint
from kvrouter.events.vllm.wire import WireRemoved, WireStored
from kvrouter.router.base.common.ids import GPU, WorkerKey
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.workers.registration import CatalogSpec, Registration
from kvrouter.router.model.workers.stream_state import StreamState

REPLAY = "tcp://127.0.0.1:2"


def make(replay: str | None = REPLAY, catalog: CatalogSpec | None = None) -> Ingest:
    numbers = count()
    registration = Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1", replay=replay, catalog=catalog)
    return Ingest(registration, seed=None, decoder=BatchDecoder(), new_epoch=lambda: f"e{next(numbers)}")


def stored(hashes: list[int], group: int | None = 0, **fields: Any) -> WireStored:
    defaults: dict[str, Any] = {
        "parent_block_hash": 77, "token_ids": [], "block_size": 16, "lora_id": None, "medium": GPU, "lora_name": None,
        "kv_cache_spec_kind": None if group is None else "full_attention",
    }  # fmt: skip
    return WireStored(block_hashes=hashes, group_idx=group, **(defaults | fields))


def removed(hashes: list[int], group: int | None = 0, medium: str = GPU) -> WireRemoved:
    return WireRemoved(block_hashes=hashes, medium=medium, group_idx=group)


def batch(seq: int, *events: Any) -> Batch:
    payload = encode_batch(float(seq), list(events))
    return Batch(seq, payload, fingerprint(payload), False)


def feed(ingest: Ingest, *items: Any) -> Ingest:
    for item in items:
        ingest.apply(item, 1.0)
    return ingest


def live(**options: Any) -> Ingest:
    ingest = feed(make(**options), FellBehind(), Connected(), CaughtUp())
    assert ingest.state is StreamState.LIVE
    return ingest
