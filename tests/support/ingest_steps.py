# SPDX-License-Identifier: Apache-2.0
"""Events of a stock stream, and an `Ingest` that they are applied to."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvrouter.events.patch.items import Loaded
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.codec import BatchDecoder, encode_batch
from kvrouter.events.vllm.stream_items import Batch, Connected, fingerprint
from kvrouter.events.vllm.wire import WireRemoved, WireStored
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState

REPLAY = "tcp://127.0.0.1:2"


def make(replay: str | None = REPLAY, **registered: Any) -> Ingest:
    """Return the ingest of a worker; `registered` are more fields of its registration."""
    numbers = count()
    registration = Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1", replay=replay, **registered)
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


def feed(ingest: Ingest, *items: Any, now: float = 1.0) -> Ingest:
    """Apply the items, and `CaughtUp` after each snapshot, as the cursor yields it when nothing came meanwhile."""
    for item in items:
        ingest.apply(item, now)
        if isinstance(item, Loaded):
            ingest.apply(CaughtUp(), now)
    return ingest


def live(**options: Any) -> Ingest:
    ingest = feed(make(**options), FellBehind(), Connected(), CaughtUp())
    assert ingest.state is StreamState.LIVE
    return ingest


def taken(ingest: Ingest) -> PendingCommit:
    """Take the commit that is due."""
    commit = ingest.held.take()
    assert commit is not None
    return commit


def restored(ingest: Ingest, seq: int = 0, residency: dict[Place, Any] | None = None, **registered: Any) -> Ingest:
    """Return the ingest of another router that loaded what this one committed, with `residency`, up to batch `seq`."""
    commit = taken(ingest)
    again = make(**registered)
    again.restore(commit.epoch, seq, residency or {}, {}, commit.meta)
    return again
