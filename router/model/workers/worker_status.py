# SPDX-License-Identifier: Apache-2.0
"""The status of one worker, as `GET /workers` shows it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.engine_name import DEFAULT_ENGINE
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import REGISTER
from kvrouter.router.model.workers.stream_state import StreamState


class PatchStatus(msgspec.Struct, frozen=True):
    """The state of a worker's engine patch, if the reports of the patch are followed."""

    version: str
    epoch: str
    heartbeat_age_s: float | None
    heartbeats: int
    # Heartbeats that disagreed with the index.
    mismatches: int
    snapshots: int
    features: dict[str, str]


class Recovery(msgspec.Struct, frozen=True):
    """The gaps in a worker's events and their repairs, since this process began to follow the worker."""

    missed_batches: int = 0
    # Gaps that were filled by replayed batches.
    replays: int = 0
    # Snapshots that replaced the index of the worker.
    snapshots: int = 0
    # How often the index of the worker was dropped and learned again.
    relearned: int = 0
    # Blocks that the index had and a snapshot did not have.
    ghost_blocks: int = 0
    # Blocks that a snapshot had and the index did not have.
    lost_blocks: int = 0


class TokensStatus(msgspec.Struct, frozen=True):
    """The way in which texts for a worker are tokenized."""

    # local, render, tokenize or none.
    way: str
    # Why this way does not work well, or "".
    problem: str = ""


class ReuseStatus(msgspec.Struct, frozen=True):
    """The predicted and the reported reuse, over all answers through this process for which both are known."""

    predicted_tokens: int
    delivered_tokens: int
    answers: int


class WorkerStatus(msgspec.Struct, frozen=True):
    """The status of one rank of one worker; docs/reference/http.md describes the fields."""

    worker_id: str
    dp_rank: int
    model: str
    url: str | None
    state: str
    # Seconds in this state.
    state_age_s: float
    # Whether the known residency of the worker counts.
    credited: bool
    # Whether the worker has no usable events and is credited with the prompts that were sent to it.
    approximate: bool
    reason: str
    epoch: str | None
    # The last batch whose effect the answers of this process show.
    seq: int | None
    catalog: dict[str, Any] | None
    catalog_source: str | None
    hash_scheme: str
    # The number of blocks by place (`g0:GPU`), for every medium that was seen, even if it earns no credit.
    residency: dict[str, int]
    lag_ms: float | None
    gaps: int
    recovery: Recovery
    last_event_age_s: float | None
    patch: PatchStatus | None = None
    # Blocks of the worker that exceeded a bound of this router and earn no credit; `reason` explains it.
    refused_blocks: int = 0
    tokens: TokensStatus | None = None
    # The source that names the worker (source_precedence.py).
    source: str = REGISTER
    # Whether a client or the source wants the worker to take no new requests.
    draining: bool = False
    # Why the worker takes no new requests now, for any reason, or "" if it takes them.
    closed: str = ""
    # both, prefill or decode.
    role: str = "both"
    # The way in which a prompt that another worker computed is handed to this worker.
    handover: str = "kv_transfer_params"
    # The kind of engine that the router assumes (engine_name.py).
    engine: str = DEFAULT_ENGINE
    # The KV cache as the engine's metrics page describes it.
    engine_cache: EngineCache = EngineCache()
    # Why the predictions for this worker cannot be trusted, by its engine's reports, or "" if they can.
    predictions: str = ""
    # None if no answer of the worker was judged in this process.
    reuse: ReuseStatus | None = None

    @classmethod
    def unregistered(cls, given: Registration, reason: str) -> WorkerStatus:
        """Return the status of a worker that a source lists but that is not registered yet.

        The worker's model may not be known. `reason` is why it is not registered.
        """
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
