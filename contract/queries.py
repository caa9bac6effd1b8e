# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt each worker would reuse: the bodies and the answer of `/query` and `/query_by_hash`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.contract import fields, hits

HELD = "with held: where the blocks of the prompt lie, place by place"


class PromptBody(msgspec.Struct, kw_only=True):
    """The fields of every question about a prompt: the model, and what enters its block hashes beside the tokens."""

    model: fields.ModelGiven = None
    model_name: fields.ModelName = None
    modelname: fields.Modelname = None
    routing_group: fields.RoutingGroupGiven = None
    lora_name: fields.LoraName = None
    cache_salt: fields.CacheSalt = None
    workers: fields.WorkerIds = None
    explain: Annotated[bool, Meta(description="whether the answer has its reasons")] = False


class IndexBody(PromptBody, kw_only=True):
    """The fields of every question that only reads the index."""

    held: Annotated[
        bool, Meta(description="whether the answer says where each block lies; for people, as it costs more than a hit")
    ] = False


class QueryBody(IndexBody, kw_only=True):
    """The body of `POST /query`."""

    token_ids: fields.TokenIds


class QueryByHashBody(IndexBody, kw_only=True):
    """The body of `POST /query_by_hash`."""

    block_hashes: fields.BlockHashes
    num_tokens: Annotated[
        fields.NumTokens | None,
        Meta(description="length of the whole prompt in tokens; by default one more than the hashes cover"),
    ] = None


class InstanceReply(hits.Overlap, frozen=True, kw_only=True, omit_defaults=True):
    """The hit of one worker: the numbers of its best rank. A field is absent where it does not apply."""

    state: fields.State
    reason: Annotated[str | None, Meta(description="why credit is withheld or reduced")] = None
    approximate: Annotated[
        bool | None, Meta(description="true: an estimate from what was sent there, as the worker has no usable events")
    ] = None
    peer: Annotated[
        hits.PeerHit | None,
        Meta(description="what it would reuse with the best source to fetch blocks from; absent: none"),
    ] = None
    groups: Annotated[
        tuple[hits.GroupCover, ...] | None,
        Meta(description="with explain: how far each group alone would let the GPU hit reach"),
    ] = None
    limited_by: Annotated[
        hits.HitLimit | None,
        Meta(description="with explain: the group that kept the hit from being longer; null: none did"),
    ] = None
    held: Annotated[
        tuple[hits.HeldRuns, ...] | None,
        Meta(description=HELD),
    ] = None


class ExplainedInstance(InstanceReply, frozen=True, kw_only=True, omit_defaults=True):
    """The hit of one worker, to a question with `explain`: `limited_by` is null where no group limits the hit."""

    groups: Annotated[
        tuple[hits.GroupCover, ...], Meta(description="how far each group alone would let the GPU hit reach")
    ]
    limited_by: Annotated[
        hits.HitLimit | None, Meta(description="the group that kept the hit from being longer; null: none did")
    ]
    held: Annotated[
        tuple[hits.HeldRuns, ...] | None,
        Meta(description=HELD),
    ] = None


class QueryReply(msgspec.Struct, frozen=True):
    """The hits of all workers of the model, also of workers without a hit."""

    instances: Annotated[dict[str, InstanceReply], Meta(description="what each worker would reuse, by its id")]
    scores: Annotated[dict[str, dict[str, int]], Meta(description="the longest match by worker and rank, in tokens")]
    frequencies: Annotated[tuple[int, ...], Meta(description="always empty; clients of dynamo.indexer expect it")] = ()
