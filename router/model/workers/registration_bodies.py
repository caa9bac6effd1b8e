# SPDX-License-Identifier: Apache-2.0
"""What clients may say of a worker, as typed structs. The aliases are those of Mooncake's indexer RFC and of Dynamo's
services."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from kvrouter.router.base.common.errors import BadQuestion


class ModelNamed(Protocol):
    """A body that names a model under any of its three names."""

    @property
    def model(self) -> str | None: ...

    @property
    def model_name(self) -> str | None: ...

    @property
    def modelname(self) -> str | None: ...


class GroupBody(msgspec.Struct, kw_only=True):
    """One KV cache group as registered; sizes and windows in tokens."""

    kind: str
    block_size: int
    group_idx: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    prefix_cacheable: bool = True
    spec_class: int | None = None


class CatalogBody(msgspec.Struct, kw_only=True):
    """A catalog as registered. What is given overrides what is learned; the rest is learned."""

    groups: list[GroupBody] | None = None
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    hash_algo: str | None = None
    none_hash: str | None = None
    none_hash_seed: str | int | None = None
    hash_lookahead_tokens: int | None = None
    partial_hits: bool | None = None
    offload_blocks_per_chunk: int | None = None
    offload_connector: str | None = None
    lora_paths: dict[str, str] | None = None


class DynamoWorker(msgspec.Struct, kw_only=True):
    """How Dynamo's selection service has a worker's addresses: `endpoint` is HTTP, and these beside it
    (`dynamo_shapes.py`)."""

    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[str, str] | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    routing_group: str | None = None


class WorkerPatch(DynamoWorker, kw_only=True):
    """`PATCH /workers/{id}`: null unsets, absent keeps. `dp_rank` and `model` say which worker is meant. With a field
    of Dynamo's, null keeps too.

    state: draining takes no new request and lets running ones finish."""

    model: str | None = None
    model_name: str | None = None
    modelname: str | None = None
    dp_rank: int | None = None
    state: Literal["active", "draining"] | None = None
    endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    replay_endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    patch_endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    patch_key: str | msgspec.UnsetType | None = msgspec.UNSET
    url: str | msgspec.UnsetType | None = msgspec.UNSET
    block_size: int | msgspec.UnsetType | None = msgspec.UNSET
    lora_name: str | msgspec.UnsetType | None = msgspec.UNSET
    catalog: CatalogBody | msgspec.UnsetType | None = msgspec.UNSET
    role: str | msgspec.UnsetType | None = msgspec.UNSET
    handover: str | msgspec.UnsetType | None = msgspec.UNSET
    engine: str | msgspec.UnsetType | None = msgspec.UNSET


class RegisterBody(DynamoWorker, kw_only=True):
    """`POST /register` and `POST /workers`. One of instance_id and worker_id, and one of the model's three names.

    role: both (default), prefill or decode. handover: kv_transfer_params (default) or header. engine: vllm or
    sglang; absent: found out from its HTTP."""

    instance_id: str | int | None = None
    worker_id: str | int | None = None
    model: str | None = None
    model_name: str | None = None
    modelname: str | None = None
    dp_rank: int | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    patch_endpoint: str | None = None
    patch_key: str | None = None
    url: str | None = None
    block_size: int | None = None
    lora_name: str | None = None
    catalog: CatalogBody | None = None
    role: str | None = None
    handover: str | None = None
    engine: str | None = None


class UnregisterBody(msgspec.Struct, kw_only=True):
    """`POST /unregister`: all ranks, where dp_rank is absent."""

    instance_id: str | int | None = None
    worker_id: str | int | None = None
    model: str | None = None
    model_name: str | None = None
    modelname: str | None = None
    dp_rank: int | None = None


def model_of(body: ModelNamed) -> str | None:
    """The model, whichever of its names was used. Raises BadQuestion when two contradict each other."""
    named = body.model
    for other in (body.model_name, body.modelname):
        if other is not None:
            if named is not None and other != named:
                raise BadQuestion(
                    "model, model_name and modelname contradict each other; give one", code="invalid_model"
                )
            named = other
    return named
