# SPDX-License-Identifier: Apache-2.0
"""The load of all workers: the answer of `/loads`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.contract import fields


class EngineReply(msgspec.Struct, frozen=True):
    """An engine's last report of its load."""

    waiting: Annotated[int, Meta(description="requests that wait")]
    running: Annotated[int, Meta(description="requests that run")]
    kv_usage: Annotated[float, Meta(description="share of the KV cache in use, 0 to 1")]
    age_s: Annotated[float, Meta(description="seconds since the engine reported it")]


class WorkerLoadReply(msgspec.Struct, frozen=True):
    """One worker's load, from all routers and from requests that bypassed them. The first five fields are Dynamo's."""

    worker_id: fields.WorkerName
    dp_rank: fields.DpRank
    potential_prefill_tokens: Annotated[int, Meta(description="prefill tokens that are queued there")]
    potential_decode_blocks: Annotated[int, Meta(description="blocks of context that are decoded there")]
    active_requests: Annotated[
        int,
        Meta(description="requests in flight, as engines count them: each answer to each prompt of a list is one"),
    ]
    decode_tokens: Annotated[int, Meta(description="context tokens that are being decoded")]
    saturated: Annotated[bool, Meta(description="whether it takes no more prompts")]
    engine: Annotated[EngineReply | None, Meta(description="what the engine last reported; null: nothing")]
    prefill_rate: Annotated[float | None, Meta(description="measured tokens/s; null until measured")]
    decode_rate: Annotated[float | None, Meta(description="measured tokens/s; null until measured")]
    lent_tokens: Annotated[
        int | UnsetType,
        Meta(description="tokens of its tiers that other workers fetch now; absent: its engine lends none"),
    ] = UNSET


class ModelLoadReply(msgspec.Struct, frozen=True):
    """The load of one model's workers."""

    model_name: fields.Model
    routing_group: fields.RoutingGroup
    loads: Annotated[list[WorkerLoadReply], Meta(description="the load of each worker")]
    pending_count: Annotated[
        int, Meta(description="prompts that wait in this process because all workers are saturated")
    ]
    pending_isl_tokens: Annotated[int, Meta(description="tokens of the prompts that wait in this process")]
