# SPDX-License-Identifier: Apache-2.0
"""Workers that clients register, change and drop: the bodies and answers of `/register`, `/unregister` and `/workers`.

Aliases of fields are those of Mooncake's indexer RFC and of Dynamo's services.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.contract import fields

WORKER_ID = (
    "required: a text, or a number up to 2^64-1, which answers return as a number; must not end in @ and a number"
)
MODEL = "the model's name, as clients will ask for it; required without url"
ENDPOINT = (
    "the ZMQ address of the engine's KV events, like tcp://10.0.0.5:5557; an HTTP address is Dynamo's form of url; "
    "at least one of url and endpoint is required"
)
REPLAY_ENDPOINT = "the ZMQ address of the engine's replay socket; needs endpoint"
PATCH_ENDPOINT = "where the engine patch answers; by default derived from endpoint; off: not looked for"
PATCH_KEY = "the patch's public CURVE key (40 characters, Z85); with it, nothing unencrypted is read"
URL = "the engine's HTTP address, with an optional path before all others; no query, no fragment; /v1 at its end is cut"
ENGINE_KEY = (
    "the name of the engine's API key in worker_api_keys_file of each router, never the key; by default `default`"
)
PEER = (
    "HOST:PORT where vLLM's own p2p tier listens, its base port for all ranks; with it, the router may have engines fetch blocks "
    "from each other (docs/how-to/offload.md)"
)
BLOCK_SIZE = "tokens in a block; by default learned"
LORA_NAME = "the one LoRA adapter that the worker serves"
CATALOG = "what is known of the KV cache; it overrides what is learned, and the rest is still learned"
ROLE = "both (default), prefill or decode"
HANDOVER = "how it is handed a prompt that another computed: kv_transfer_params (default) or header"
ENGINE = "vllm or sglang; by default what the engine patch or the engine's HTTP shows, else vllm"

# The fields of both answers.
LIFECYCLE = "schedulable; incomplete: without a url, or draining; unschedulable: dropped"
EVENTS_ENDPOINT = "the ZMQ address of the engine's KV events"
REGISTERED_REPLAY = "the ZMQ address of the engine's replay socket"
REGISTERED_BLOCK_SIZE = "tokens in a block, as registered"
NOTE = "what the engine did not report, and the consequence; or which part of the url was left out"


class GroupBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One KV cache group. Groups or block sizes that contradict the events earn no credit."""

    kind: Annotated[
        str,
        Meta(
            description="vLLM's kind: full_attention, mla_attention, sliding_window, sliding_window_mla, mamba, "
            "chunked_local_attention, sink_full_attention, encoder_only_attention, cross_attention, unknown"
        ),
    ]
    block_size: Annotated[int, Meta(description="tokens in a block of the group")]
    group_idx: Annotated[
        int | None,
        Meta(description="the number that the engine's events give the group; one group alone may have any, or none"),
    ] = None
    sliding_window: Annotated[int | None, Meta(description="tokens of the sliding window")] = None
    attention_chunk_size: Annotated[int | None, Meta(description="tokens of an attention chunk")] = None
    eagle: Annotated[bool, Meta(description="whether the group belongs to an EAGLE drafter")] = False
    prefix_cacheable: Annotated[bool, Meta(description="whether blocks of the group can be reused")] = True
    spec_class: Annotated[int | None, Meta(description="groups of one class are looked up jointly")] = None


class CatalogBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's KV cache as registered. A given field overrides what the router learns; absent fields are learned."""

    groups: Annotated[Sequence[GroupBody] | None, Meta(description="the KV cache groups, 64 at most")] = None
    hash_block_size: Annotated[int | None, Meta(description="tokens that a block hash covers")] = None
    scheduler_block_size: Annotated[int | None, Meta(description="tokens in a block of the scheduler")] = None
    hash_algo: Annotated[
        str | None,
        Meta(
            description="sha256, sha256_cbor, xxhash, xxhash_cbor (vLLM); sglang, or sglang_bigram with EAGLE (SGLang); by default "
            "learned"
        ),
    ] = None
    none_hash: Annotated[str | None, Meta(description="the parent hash of a first block, in hex")] = None
    none_hash_seed: Annotated[str | int | None, Meta(description="the engine's PYTHONHASHSEED")] = None
    hash_lookahead_tokens: Annotated[
        int | None,
        Meta(
            description="tokens after a block that its hash covers too (EAGLE or MTP, vLLM 0.33); none or one is learned"
        ),
    ] = None
    partial_hits: Annotated[bool | None, Meta(description="whether a hit may end inside a block")] = None
    offload_blocks_per_chunk: Annotated[int | None, Meta(description="blocks that the offload tier stores as one")] = (
        None
    )
    offload_connector: Annotated[
        str | None,
        Meta(description="vLLM's name of the KV connector whose rule holds for CPU and disk (docs/reference/wire.md)"),
    ] = None
    lora_paths: Annotated[
        dict[str, str] | None,
        Meta(description="paths of LoRA adapters by name, 1,024 at most; both are part of block hashes"),
    ] = None


class DynamoWorker(msgspec.Struct, kw_only=True):
    """The fields that only a worker of Dynamo's selection service has; there `endpoint` is an HTTP address."""

    kv_events_endpoint: Annotated[str | None, Meta(description="the ZMQ address of the engine's KV events")] = None
    kv_events_endpoints: Annotated[dict[str, str] | None, Meta(description="the same for each rank")] = None
    data_parallel_start_rank: Annotated[int | None, Meta(description="the first rank; default 0")] = None
    data_parallel_size: Annotated[
        int | None, Meta(description="ranks that this registration stands for; each becomes a worker")
    ] = None
    routing_group: fields.RoutingGroupGiven = None


class WorkerPatch(DynamoWorker, kw_only=True):
    """Changes of a worker: null unsets a field, and an absent field stays as it is.

    `dp_rank` and the model's name select the worker. With a field of Dynamo's services, null keeps the value too.
    """

    model: Annotated[str | None, Meta(description="changes only ranks of this model")] = None
    model_name: fields.ModelName = None
    modelname: fields.Modelname = None
    dp_rank: Annotated[int | None, Meta(description="changes only this data-parallel rank")] = None
    state: Annotated[
        Literal["active", "draining"] | None,
        Meta(description="active, or draining: no new requests, and running ones finish"),
    ] = None
    endpoint: Annotated[str | UnsetType | None, Meta(description=ENDPOINT)] = UNSET
    replay_endpoint: Annotated[str | UnsetType | None, Meta(description=REPLAY_ENDPOINT)] = UNSET
    patch_endpoint: Annotated[str | UnsetType | None, Meta(description=PATCH_ENDPOINT)] = UNSET
    patch_key: Annotated[str | UnsetType | None, Meta(description=PATCH_KEY)] = UNSET
    engine_key: Annotated[str | UnsetType | None, Meta(description=ENGINE_KEY)] = UNSET
    url: Annotated[str | UnsetType | None, Meta(description=URL)] = UNSET
    block_size: Annotated[int | UnsetType | None, Meta(description=BLOCK_SIZE)] = UNSET
    lora_name: Annotated[str | UnsetType | None, Meta(description=LORA_NAME)] = UNSET
    catalog: Annotated[CatalogBody | UnsetType | None, Meta(description=CATALOG)] = UNSET
    role: Annotated[str | UnsetType | None, Meta(description=ROLE)] = UNSET
    handover: Annotated[str | UnsetType | None, Meta(description=HANDOVER)] = UNSET
    engine: Annotated[str | UnsetType | None, Meta(description=ENGINE)] = UNSET
    peer: Annotated[str | UnsetType | None, Meta(description=PEER)] = UNSET


class RegisterBody(DynamoWorker, kw_only=True):
    """A worker to register. With a `url` alone, the router queries the engine for the rest."""

    instance_id: Annotated[
        str | int | None, Meta(description="the worker's id, as Mooncake's and Dynamo's clients name it")
    ] = None
    worker_id: Annotated[str | int | None, Meta(description=WORKER_ID)] = None
    model: Annotated[str | None, Meta(description=MODEL)] = None
    model_name: fields.ModelName = None
    modelname: fields.Modelname = None
    dp_rank: Annotated[int | None, Meta(description="data-parallel rank; default 0")] = None
    endpoint: Annotated[str | None, Meta(description=ENDPOINT)] = None
    replay_endpoint: Annotated[str | None, Meta(description=REPLAY_ENDPOINT)] = None
    patch_endpoint: Annotated[str | None, Meta(description=PATCH_ENDPOINT)] = None
    patch_key: Annotated[str | None, Meta(description=PATCH_KEY)] = None
    engine_key: Annotated[str | None, Meta(description=ENGINE_KEY)] = None
    url: Annotated[str | None, Meta(description=URL)] = None
    block_size: Annotated[int | None, Meta(description=BLOCK_SIZE)] = None
    lora_name: Annotated[str | None, Meta(description=LORA_NAME)] = None
    catalog: Annotated[CatalogBody | None, Meta(description=CATALOG)] = None
    role: Annotated[str | None, Meta(description=ROLE)] = None
    handover: Annotated[str | None, Meta(description=HANDOVER)] = None
    engine: Annotated[str | None, Meta(description=ENGINE)] = None
    peer: Annotated[str | None, Meta(description=PEER)] = None


class UnregisterBody(msgspec.Struct, kw_only=True):
    """The worker to drop, with all its ranks if dp_rank is absent."""

    instance_id: Annotated[
        str | int | None, Meta(description="the worker's id, as Mooncake's and Dynamo's clients name it")
    ] = None
    worker_id: Annotated[str | int | None, Meta(description="the worker's id")] = None
    model: Annotated[str | None, Meta(description="drops only ranks of this model")] = None
    model_name: fields.ModelName = None
    modelname: fields.Modelname = None
    dp_rank: Annotated[int | None, Meta(description="drops only this data-parallel rank")] = None


class RegisteredReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to registering or dropping a worker. A field is absent where it does not apply."""

    status: Annotated[str, Meta(description="always ok")]
    worker_id: fields.WorkerName
    dropped: Annotated[int | None, Meta(description="ranks that were dropped")] = None
    model_name: Annotated[str | None, Meta(description="the model's name")] = None
    routing_group: Annotated[str | None, Meta(description="always default; Dynamo's clients read it")] = None
    lifecycle: Annotated[
        str | None,
        Meta(description=LIFECYCLE),
    ] = None
    endpoint: Annotated[str | None, Meta(description="the engine's HTTP address")] = None
    kv_events_endpoint: Annotated[str | None, Meta(description=EVENTS_ENDPOINT)] = None
    replay_endpoint: Annotated[str | None, Meta(description=REGISTERED_REPLAY)] = None
    block_size: Annotated[int | None, Meta(description=REGISTERED_BLOCK_SIZE)] = None
    note: Annotated[str | None, Meta(description=NOTE)] = None


class DescribedReply(RegisteredReply, frozen=True, kw_only=True, omit_defaults=True):
    """The answer that describes the registration: null stands for what is not registered."""

    model_name: fields.Model
    routing_group: fields.RoutingGroup
    lifecycle: Annotated[str, Meta(description=LIFECYCLE)]
    endpoint: fields.Endpoint
    kv_events_endpoint: Annotated[str | None, Meta(description=EVENTS_ENDPOINT)]
    replay_endpoint: Annotated[str | None, Meta(description=REGISTERED_REPLAY)]
    block_size: Annotated[int | None, Meta(description=REGISTERED_BLOCK_SIZE)]
    note: Annotated[str | None, Meta(description=NOTE)] = None


class ChangedReply(DescribedReply, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a change of a worker, with the worker's state. If several ranks changed, it describes the first."""

    state: fields.State
    draining: Annotated[bool, Meta(description="whether a client or the source wants it to get no new requests")]
    draining_s: Annotated[
        float | None,
        Meta(description="seconds that it has been draining, as far as this process knows; null if it is not draining"),
    ]
