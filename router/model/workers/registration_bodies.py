# SPDX-License-Identifier: Apache-2.0
"""The bodies of clients' requests about workers, as typed structs.

The aliases of fields are those of Mooncake's indexer RFC and of Dynamo's services.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from kvrouter.router.base.common.errors import BadQuestion


class ModelNamed(Protocol):
    """A body that has the model's name in any of three fields."""

    @property
    def model(self) -> str | None:
        """The model's name in the router's own field."""
        ...

    @property
    def model_name(self) -> str | None:
        """The model's name in an alias of `model`."""
        ...

    @property
    def modelname(self) -> str | None:
        """The model's name in another alias of `model`."""
        ...


class GroupBody(msgspec.Struct, kw_only=True):
    """One KV cache group as registered. Sizes and windows are in tokens."""

    kind: str
    block_size: int
    group_idx: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    eagle: bool = False
    prefix_cacheable: bool = True
    spec_class: int | None = None


class CatalogBody(msgspec.Struct, kw_only=True):
    """A catalog as registered. A given field overrides what the router learns; absent fields are learned."""

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
    """The fields of a worker in Dynamo's selection service, in which `endpoint` is an HTTP address (`dynamo_shapes.py`)."""

    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[str, str] | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    routing_group: str | None = None


class WorkerPatch(DynamoWorker, kw_only=True):
    """The body of `PATCH /workers/{id}`: null unsets a field, and an absent field stays as it is.

    `dp_rank` and the model's name select the worker. With a field of Dynamo's services, null keeps the value too. A
    worker in state `draining` takes no new requests and lets running ones finish.
    """

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
    """The body of `POST /register` and `POST /workers`.

    It has instance_id or worker_id, and one of the three fields for the model's name. `role` is both (default), prefill
    or decode. `handover` is kv_transfer_params (default) or header. `engine` is vllm or sglang; if it is absent, the
    router finds it out from the engine's HTTP answers.
    """

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
    """The body of `POST /unregister`, which concerns all ranks of a worker if dp_rank is absent."""

    instance_id: str | int | None = None
    worker_id: str | int | None = None
    model: str | None = None
    model_name: str | None = None
    modelname: str | None = None
    dp_rank: int | None = None


def model_of(body: ModelNamed) -> str | None:
    """Return the model's name from whichever field has it, or None. Raises BadQuestion if two fields differ."""
    model = body.model
    for other in (body.model_name, body.modelname):
        if other is not None:
            if model is not None and other != model:
                raise BadQuestion(
                    "model, model_name and modelname contradict each other; give one", code="invalid_model"
                )
            model = other
    return model
