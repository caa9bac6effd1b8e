# SPDX-License-Identifier: Apache-2.0
"""The status of all workers: the answer of `GET /workers`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.contract import fields

# Far beyond any engine. A page of metrics may contain any number, and sizes are multiplied and shown.
MAX_COUNT = 1 << 48

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


class PatchStatus(msgspec.Struct, frozen=True):
    """The engine patch of a worker, where its reports are followed."""

    version: Annotated[str, Meta(description="the version")]
    epoch: Annotated[str, Meta(description="one run of the publisher")]
    heartbeat_age_s: Annotated[float | None, Meta(description="seconds since the last heartbeat")]
    heartbeats: Annotated[int, Meta(description="heartbeats that were compared with the index")]
    mismatches: Annotated[int, Meta(description="heartbeats that disagreed with the index")]
    snapshots: Annotated[int, Meta(description="snapshots that were taken over")]
    features: Annotated[
        dict[str, str],
        Meta(description="features of the patch: on, or why not; what a failed one costs is in the worker's reason"),
    ]


class Recovery(msgspec.Struct, frozen=True):
    """The losses of a worker's stream and their repairs, since this process began to follow the worker."""

    missed_batches: Annotated[int, Meta(description="batches that did not arrive by themselves")] = 0
    replays: Annotated[int, Meta(description="times that missing batches were replayed")] = 0
    snapshots: Annotated[int, Meta(description="snapshots that replaced the index of the worker")] = 0
    relearned: Annotated[int, Meta(description="times that the index was dropped and learned again")] = 0
    ghost_blocks: Annotated[int, Meta(description="blocks that the index held and a snapshot did not")] = 0
    lost_blocks: Annotated[int, Meta(description="blocks that a snapshot held and the index did not")] = 0


class TokensStatus(msgspec.Struct, frozen=True):
    """The way in which texts for a worker are tokenized."""

    way: Annotated[str, Meta(description="local, render, tokenize or none")]
    problem: Annotated[str, Meta(description="why this way does not work well; empty if it does")] = ""


class ReuseStatus(msgspec.Struct, frozen=True):
    """The predicted and the reported reuse, over all answers through this process for which both are known."""

    predicted_tokens: Annotated[int, Meta(description="tokens that were predicted to be reused")]
    delivered_tokens: Annotated[int, Meta(description="tokens that the engine reported as reused")]
    answers: Annotated[int, Meta(description="answers that passed this process and where both numbers are known")]
    prompt_tokens: Annotated[int, Meta(description="tokens of the prompts of these answers")] = 0


class PeerStatus(msgspec.Struct, frozen=True):
    """Where an engine lends blocks to other engines."""

    host: Annotated[str, Meta(description="the host")]
    port: Annotated[int, Meta(description="the port")]


class EngineCache(msgspec.Struct, frozen=True):
    """An engine's KV cache as its metrics page describes it; null where the page does not say."""

    prefix_caching: Annotated[bool | None, Meta(description="whether the engine reuses prompts at all")] = None
    block_size: Annotated[Count | None, Meta(description="tokens in a block; the smallest size if groups differ")] = (
        None
    )
    blocks: Annotated[Count | None, Meta(description="blocks of the KV cache on the accelerator")] = None
    # For hybrid models, this differs from blocks times block_size.
    tokens: Annotated[Count | None, Meta(description="tokens of context that fit on the accelerator")] = None


class WorkerStatus(msgspec.Struct, frozen=True):
    """One rank of one worker. A worker that a source lists and that is not registered yet is `down`."""

    worker_id: fields.WorkerId
    dp_rank: fields.DpRank
    model: fields.Model
    url: Annotated[str | None, Meta(description="the engine's HTTP address; null for a worker without one")]
    state: fields.State
    state_age_s: Annotated[float, Meta(description="seconds in that state")]
    credited: Annotated[bool, Meta(description="whether residency earns credit now")]
    approximate: Annotated[
        bool, Meta(description="whether it is credited with what was sent there, as it has no usable events")
    ]
    reason: Annotated[str, Meta(description="why credit is withheld or reduced; empty if it is not")]
    epoch: Annotated[str | None, Meta(description="one run of the publisher")]
    seq: Annotated[int | None, Meta(description="the last batch whose effect this process's answers show")]
    catalog: Annotated[
        dict[str, Any] | None,
        Meta(
            description="the KV cache: groups, hash_block_size, scheduler_block_size, align (every hit is a multiple of "
            "it), partial_hits, blocks_per_chunk, offload_connector, and a problem if it earns no credit"
        ),
    ]
    catalog_source: Annotated[
        str | None,
        Meta(description="declared (by the patch), configured (by the registration) or learned (from events)"),
    ]
    hash_scheme: Annotated[str, Meta(description="the hash algorithm, and whether it is verified")]
    residency: Annotated[
        dict[str, int],
        Meta(description="blocks by group and medium, like g0:GPU; every medium seen, also without credit"),
    ]
    lag_ms: Annotated[
        float | None,
        Meta(description="delay between a batch's arrival and its effect; null while nothing is heard of the worker"),
    ]
    gaps: Annotated[int, Meta(description="gaps in the event stream, filled or lost")]
    recovery: Annotated[Recovery, Meta(description="what went missing, and how it was recovered")]
    last_event_age_s: Annotated[
        float | None, Meta(description="seconds since the last event of the engine's present process; null: none came")
    ]
    patch: Annotated[PatchStatus | None, Meta(description="the engine patch; null without it")] = None
    refused_blocks: Annotated[
        int, Meta(description="blocks that it holds and that exceeded a bound here; they earn no credit")
    ] = 0
    tokens: Annotated[TokensStatus | None, Meta(description="how texts are tokenized")] = None
    source: Annotated[str, Meta(description="who registered it: static, config, file, kubernetes or register")] = (
        "register"
    )
    draining: Annotated[bool, Meta(description="whether a client or the source wants it to get no new requests")] = (
        False
    )
    draining_s: Annotated[
        float | None,
        Meta(description="seconds that it has been draining, as far as this process knows; null if it is not draining"),
    ] = None
    closed: Annotated[str, Meta(description="why it takes no requests now, for whatever reason; empty if it does")] = ""
    role: Annotated[str, Meta(description="both, prefill or decode")] = "both"
    handover: Annotated[
        str, Meta(description="how it is handed a prompt that another computed (docs/reference/handover.md)")
    ] = "kv_transfer_params"
    engine: Annotated[str, Meta(description="vllm or sglang: whose hashes and hit rule are computed")] = "vllm"
    engine_cache: Annotated[EngineCache, Meta(description="the KV cache by the engine's own metrics page")] = (
        EngineCache()
    )
    predictions: Annotated[
        str,
        Meta(
            description="why predictions for it are not to be trusted (docs/explanation/quality.md); empty if nothing "
            "speaks against them"
        ),
    ] = ""
    reuse: Annotated[
        ReuseStatus | None, Meta(description="what was predicted and delivered; null before the first such answer")
    ] = None
    peer: Annotated[
        PeerStatus | UnsetType,
        Meta(description="where its engine lends blocks to other engines; absent: it lends none"),
    ] = UNSET


class WorkersReply(msgspec.Struct, frozen=True):
    """The status of all workers."""

    workers: Annotated[list[WorkerStatus], Meta(description="one entry for each rank of each worker")]
