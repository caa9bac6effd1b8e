# SPDX-License-Identifier: Apache-2.0
"""One worker as `GET /workers` shows it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.engine_name import DEFAULT_ENGINE
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import REGISTER
from kvrouter.router.model.workers.stream_state import StreamState


class PatchStatus(msgspec.Struct, frozen=True):
    """The engine patch behind a worker whose reports are followed. mismatches: heartbeats that disagreed with the
    index."""

    version: str
    epoch: str
    heartbeat_age_s: float | None
    heartbeats: int
    mismatches: int
    snapshots: int
    features: dict[str, str]


class Recovery(msgspec.Struct, frozen=True):
    """What went missing, how it was recovered (batches replayed, a snapshot, everything learned again), and by how many
    blocks a snapshot showed the index to be wrong. Since this process began to follow the worker."""

    missed_batches: int = 0
    replays: int = 0
    snapshots: int = 0
    relearned: int = 0
    ghost_blocks: int = 0
    lost_blocks: int = 0


class TokensStatus(msgspec.Struct, frozen=True):
    """How the tokens of texts are found for a worker (local, render, tokenize, none), and what is wrong with that."""

    way: str
    problem: str = ""


class ReuseStatus(msgspec.Struct, frozen=True):
    """Tokens that were predicted to be reused, and those that the engine reported, of all answers that passed this
    process where both are known."""

    predicted_tokens: int
    delivered_tokens: int
    answers: int


class WorkerStatus(msgspec.Struct, frozen=True):
    """One rank of one worker; docs/reference/http.md describes the fields.

    seq: the last batch whose effect this process's answers show. residency: blocks by place (`g0:GPU`), every medium
    that was seen, also one that earns no credit.
    """

    worker_id: str
    dp_rank: int
    model: str
    url: str | None
    state: str
    # Seconds in this state; whether what is known of the worker counts.
    state_age_s: float
    credited: bool
    # Credited with what was sent there, as it has no usable events.
    approximate: bool
    reason: str
    epoch: str | None
    seq: int | None
    catalog: dict[str, Any] | None
    catalog_source: str | None
    hash_scheme: str
    residency: dict[str, int]
    lag_ms: float | None
    gaps: int
    recovery: Recovery
    last_event_age_s: float | None
    patch: PatchStatus | None = None
    # Blocks that it holds and that found no room here, so that they earn no credit: `reason` says why.
    refused_blocks: int = 0
    tokens: TokensStatus | None = None
    # Who says that it is there (source_precedence.py).
    source: str = REGISTER
    # It is to take no new request, by a client's word or its source's; and why it takes none now, for whatever reason:
    # empty when it does.
    draining: bool = False
    closed: str = ""
    # both, prefill or decode; and how it is handed a prompt that was computed elsewhere.
    role: str = "both"
    handover: str = "kv_transfer_params"
    # What kind of engine it is taken for (engine_name.py).
    engine: str = DEFAULT_ENGINE
    # How its metrics page describes its KV cache.
    engine_cache: EngineCache = EngineCache()
    # Why what is predicted for it is not to be trusted, by what its engine said of answers; empty when nothing speaks
    # against it.
    predictions: str = ""
    # None: no answer of it was judged here.
    reuse: ReuseStatus | None = None

    @classmethod
    def unregistered(cls, given: Registration, reason: str) -> WorkerStatus:
        """One that a source knows and that is not registered yet; its model may not be known."""
        return cls(
            worker_id=given.worker.worker_id,
            dp_rank=given.worker.dp_rank,
            model=given.worker.model,
            url=given.url,
            state=StreamState.DOWN.value,
            state_age_s=0.0,
            credited=False,
            approximate=False,
            reason=reason,
            epoch=None,
            seq=None,
            catalog=None,
            catalog_source=None,
            hash_scheme="",
            residency={},
            lag_ms=None,
            gaps=0,
            recovery=Recovery(),
            last_event_age_s=None,
            source=given.source,
            draining=given.drains,
            closed=reason,
            role=given.role.value,
            handover=given.handover.value,
            engine=given.engine or DEFAULT_ENGINE,
        )
