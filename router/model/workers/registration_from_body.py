# SPDX-License-Identifier: Apache-2.0
"""The conversion of clients' bodies into registrations, with all checks. Pure; BadQuestion names the wrong field."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.contract.registrations import CatalogBody, GroupBody, RegisterBody, UnregisterBody, WorkerPatch
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_name import engine_problem
from kvrouter.router.model.workers.hash_algorithms import HASH_ALGOS
from kvrouter.router.model.workers.registration import MAX_GROUPS, MAX_TOKENS, CatalogSpec, GroupSpec, Registration
from kvrouter.router.model.workers.role import HandoverWay, Role, handover_problem, role_problem
from kvrouter.router.model.workers.worker_spec import (
    MAX_DP_RANK,
    connector_problem,
    endpoint_problem,
    key_name_problem,
    length_problem,
    name_problem,
    none_hash_problem,
    patch_key_problem,
    patch_problem,
    peer_problem,
    plain_none_hash,
    url_problem,
    worker_id_problem,
)

# vLLM 0.32 v1/kv_cache_interface.py:146.
GROUP_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    "sink_full_attention",
    "encoder_only_attention",
    "cross_attention",
    "unknown",
)


# Repeated here, because importing it from `json_arrays` would import numpy, which the command line does not need.
UINT64_MAX = 2**64 - 1
# As many as an engine with the patch remembers (engine_patch/hooks/event_tap.py).
MAX_LORAS = 1_024
# The longest path that a file system accepts.
MAX_PATH_CHARS = 4_096


def registration_of(body: RegisterBody, unknown_model: str | None = None) -> Registration:
    """Return the registration of the worker that the body describes. Raises BadQuestion.

    Args:
        body: The body of the request.
        unknown_model: The model to register if the body names none, or None if the body has to name one.
    """
    worker_id = worker_id_of(body)
    _check("worker_id", worker_id_problem(worker_id))
    if body.endpoint is None and body.url is None:
        raise BadQuestion("give endpoint (the ZMQ address of its KV events), url (its HTTP address), or both")
    registration = Registration(
        worker=WorkerKey(
            unknown_model if unknown_model is not None and model_of(body) is None else model_name_of(body),
            worker_id,
            dp_rank_of(body.dp_rank) or 0,
        ),
        events=body.endpoint,
        replay=body.replay_endpoint,
        url=body.url,
        block_size=body.block_size,
        lora_name=body.lora_name or None,
        catalog=None if body.catalog is None else catalog_of(body.catalog),
        patch=body.patch_endpoint,
        patch_key=body.patch_key,
        role=role_of(body.role),
        handover=handover_of(body.handover),
        engine=engine_of(body.engine),
        engine_key=body.engine_key,
        peer=body.peer,
        numbered=_is_number(body.worker_id) or _is_number(body.instance_id),
    )
    _check_addresses(registration)
    return registration


def patched(known: Registration, patch: WorkerPatch) -> Registration:
    """Return the registration `known` with the changes of the request. Raises BadQuestion."""

    def pick(new: str | int | msgspec.UnsetType | None, old: object) -> object:
        return old if new is msgspec.UNSET else new

    catalog = known.catalog
    if patch.catalog is not msgspec.UNSET:
        catalog = None if patch.catalog is None else catalog_of(patch.catalog)
    registration: Registration = msgspec.structs.replace(
        known,
        events=pick(patch.endpoint, known.events),
        replay=pick(patch.replay_endpoint, known.replay),
        url=pick(patch.url, known.url),
        block_size=pick(patch.block_size, known.block_size),
        lora_name=pick(patch.lora_name, known.lora_name) or None,
        catalog=catalog,
        patch=pick(patch.patch_endpoint, known.patch),
        patch_key=pick(patch.patch_key, known.patch_key),
        draining=known.draining if patch.state is None else patch.state == "draining",
        role=known.role if patch.role is msgspec.UNSET else role_of(patch.role),
        handover=known.handover if patch.handover is msgspec.UNSET else handover_of(patch.handover),
        engine=known.engine if patch.engine is msgspec.UNSET else engine_of(patch.engine),
        engine_key=pick(patch.engine_key, known.engine_key),
        peer=pick(patch.peer, known.peer),
    )
    if registration.events is None and registration.url is None:
        raise BadQuestion("endpoint and url cannot both be unset; DELETE the worker to drop it")
    _check_addresses(registration)
    return registration


def _is_number(worker_id: str | int | None) -> bool:
    """Return whether answers have this id as a number, which MessagePack and Dynamo's clients limit to 64 bits."""
    return isinstance(worker_id, int) and 0 <= worker_id <= UINT64_MAX


def model_of(body: Any) -> str | None:
    """Return the model's name from whichever of a body's three fields has it, or None.

    Raises BadQuestion if two fields differ.
    """
    model: str | None = body.model
    for other in (body.model_name, body.modelname):
        if other is not None:
            if model is not None and other != model:
                raise BadQuestion(
                    "model, model_name and modelname contradict each other; give one", code="invalid_model"
                )
            model = other
    return model


def worker_id_of(body: RegisterBody | UnregisterBody) -> str:
    """Return the worker's id as text from whichever field has it. Raises BadQuestion."""
    worker_ids = {str(name) for name in (body.instance_id, body.worker_id) if name is not None}
    if not worker_ids:
        raise BadQuestion("worker_id (or instance_id) is missing: give the worker a name")
    if len(worker_ids) > 1:
        raise BadQuestion("worker_id and instance_id contradict each other; give one")
    worker_id = worker_ids.pop()
    _check("worker_id", name_problem(worker_id))
    return worker_id


def model_name_of(body: RegisterBody) -> str:
    """Return the model's name. Raises BadQuestion if it is missing or not valid."""
    model = model_of(body)
    if model is None:
        raise BadQuestion("model (or model_name, modelname) is missing: name the model as clients will ask for it")
    _check("model", name_problem(model))
    return model


def dp_rank_of(given: int | None) -> int | None:
    """Return the given rank, which may be None. Raises BadQuestion if it is out of range."""
    _check_number("dp_rank", given, 0, MAX_DP_RANK)
    return given


def role_of(given: str | None) -> Role:
    """Return the given role, or the default for None. Raises BadQuestion."""
    if given is not None:
        _check("role", role_problem(given))
    return Role(given or Role.BOTH)


def handover_of(given: str | None) -> HandoverWay:
    """Return the given way of a hand-over, or the default for None. Raises BadQuestion."""
    if given is not None:
        _check("handover", handover_problem(given))
    return HandoverWay(given or HandoverWay.KV_TRANSFER_PARAMS)


def engine_of(given: str | None) -> str | None:
    """Return the given kind of engine, which may be None. Raises BadQuestion."""
    if given is not None:
        _check("engine", engine_problem(given))
    return given


def catalog_of(body: CatalogBody) -> CatalogSpec:
    """Return the stated catalog. Raises BadQuestion."""
    groups = body.groups or []
    if len(groups) > MAX_GROUPS:
        raise BadQuestion(f"catalog.groups has {len(groups)} groups; at most {MAX_GROUPS} are possible")
    specs = tuple(_group_of(group, f"catalog.groups[{index}]") for index, group in enumerate(groups))
    indices = [spec.group_idx for spec in specs]
    if len(set(indices)) < len(indices):
        raise BadQuestion("catalog.groups names one group_idx twice; give each group its own")
    _check_number("catalog.hash_block_size", body.hash_block_size)
    _check_number("catalog.scheduler_block_size", body.scheduler_block_size)
    _check_number("catalog.hash_lookahead_tokens", body.hash_lookahead_tokens, 0)
    _check_number("catalog.offload_blocks_per_chunk", body.offload_blocks_per_chunk)
    if body.offload_connector is not None:
        _check("catalog.offload_connector", connector_problem(body.offload_connector))
    if body.hash_algo is not None and body.hash_algo not in HASH_ALGOS:
        raise BadQuestion(f"catalog.hash_algo must be one of {', '.join(HASH_ALGOS)}")
    loras = body.lora_paths or {}
    if len(loras) > MAX_LORAS:
        raise BadQuestion(f"catalog.lora_paths has {len(loras)} entries; at most {MAX_LORAS} are possible")
    for name, path in loras.items():
        _check("catalog.lora_paths", length_problem(name))
        _check("catalog.lora_paths", length_problem(path, MAX_PATH_CHARS))
    _check("catalog.none_hash_seed", length_problem(str(body.none_hash_seed or "")))
    if body.none_hash is not None:
        _check("catalog.none_hash", none_hash_problem(body.none_hash, body.hash_algo))
    return CatalogSpec(
        groups=specs,
        hash_block_size=body.hash_block_size,
        scheduler_block_size=body.scheduler_block_size,
        hash_algo=body.hash_algo,
        none_hash=None if body.none_hash is None else plain_none_hash(body.none_hash),
        none_hash_seed=None if body.none_hash_seed is None else str(body.none_hash_seed),
        hash_lookahead_tokens=body.hash_lookahead_tokens,
        partial_hits=body.partial_hits,
        offload_blocks_per_chunk=body.offload_blocks_per_chunk,
        offload_connector=body.offload_connector,
        lora_paths=loras,
    )


def _group_of(body: GroupBody, where: str) -> GroupSpec:
    if body.kind.lower() not in GROUP_KINDS:
        raise BadQuestion(f"{where}.kind is not a kind of KV cache group; write one of {', '.join(GROUP_KINDS)}")
    _check_number(f"{where}.group_idx", body.group_idx, 0, MAX_GROUPS - 1)
    _check_number(f"{where}.block_size", body.block_size)
    _check_number(f"{where}.sliding_window", body.sliding_window)
    _check_number(f"{where}.attention_chunk_size", body.attention_chunk_size)
    _check_number(f"{where}.spec_class", body.spec_class, 0)
    return GroupSpec(
        group_idx=body.group_idx,
        kind=body.kind.lower(),
        block_size=body.block_size,
        sliding_window=body.sliding_window,
        attention_chunk_size=body.attention_chunk_size,
        eagle=body.eagle,
        prefix_cacheable=body.prefix_cacheable,
        spec_class=body.spec_class,
    )


def _check_addresses(registration: Registration) -> None:
    for field, endpoint in (("endpoint", registration.events), ("replay_endpoint", registration.replay)):
        if endpoint is not None:
            _check(field, endpoint_problem(endpoint))
    if registration.patch is not None:
        _check("patch_endpoint", patch_problem(registration.patch))
    if registration.engine_key is not None:
        _check("engine_key", key_name_problem(registration.engine_key))
    if registration.peer is not None:
        _check("peer", peer_problem(registration.peer, registration.worker.dp_rank))
    if registration.patch_key is not None:
        _check("patch_key", patch_key_problem(registration.patch_key, registration.patch))
    if registration.replay is not None and registration.events is None:
        raise BadQuestion("replay_endpoint needs endpoint: events cannot be replayed where none are read")
    if registration.url is not None:
        _check("url", url_problem(registration.url))
    _check_number("block_size", registration.block_size)
    _check("lora_name", length_problem(registration.lora_name or ""))


def _check_number(field: str, value: int | None, least: int = 1, most: int = MAX_TOKENS) -> None:
    if value is not None and not least <= value <= most:
        raise BadQuestion(f"{field} must be a whole number, {least} to {most}")


def _check(field: str, problem: str | None) -> None:
    if problem:
        raise BadQuestion(f"{field} {problem}")
