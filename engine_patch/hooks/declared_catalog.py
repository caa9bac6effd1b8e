# SPDX-License-Identifier: Apache-2.0
"""Reads the declared catalog from a running scheduler: facts that readers need to predict hits and that events lack.

Names differ between versions; a missing value is None, never guessed.
Sources: vLLM 0.20 to 0.33 v1/core/kv_cache_coordinator.py, v1/core/kv_cache_utils.py, v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvrouter.engine_patch.hooks.offload_events import (
    blocks_per_chunk,
    connector_name,
    connector_names,
    peer_address,
    suffix_partial_hits,
)
from kvrouter.engine_patch.reporter.translate import OffloadGroup, short_hash
from kvrouter.events.patch.messages import DeclaredCatalog, DeclaredGroup, HashExample

CHUNKED = "chunked_local_attention"
# The kv_cache_spec_kind of each spec class, for vLLM 0.20 and 0.21, which have no get_kv_cache_spec_kind.
_KINDS = {
    "FullAttentionSpec": "full_attention",
    "TQFullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window_mla",
    "MambaSpec": "mamba",
    "ChunkedLocalAttentionSpec": CHUNKED,
    "SinkFullAttentionSpec": "sink_full_attention",
    "EncoderOnlyAttentionSpec": "encoder_only_attention",
    "CrossAttentionSpec": "cross_attention",
}
# Attributes in which vLLM may state how many of the following tokens its block hashes cover (RFC
# vllm-project/vllm#50438).
_LOOKAHEAD_NAMES = ("hash_lookahead_tokens", "num_hash_lookahead_tokens", "num_lookahead_hash_tokens")


def _vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


def read_catalog(scheduler: Any, lora_paths: Mapping[str, str], vllm_version: str, dp_rank: int) -> DeclaredCatalog:
    """Return the catalog of a scheduler; raise any error that its attributes raise if its layout is unknown."""
    coordinator = scheduler.kv_cache_manager.coordinator
    pool = scheduler.kv_cache_manager.block_pool
    cache_config, connector = scheduler.cache_config, scheduler.connector
    algo = getattr(cache_config, "prefix_caching_hash_algo", None)
    lookahead = read_lookahead(scheduler)
    none_hash, example = read_hashing(algo, pool.hash_block_size, lookahead)
    scheduler_block_size = getattr(coordinator, "scheduler_block_size", scheduler.block_size)
    return DeclaredCatalog(
        groups=read_groups(coordinator),
        hash_block_size=pool.hash_block_size,
        scheduler_block_size=scheduler_block_size,
        align=read_align(coordinator, scheduler_block_size),
        partial_hits=bool(getattr(coordinator, "enable_partial_hash_hits", False)),
        retention_interval=read_retention(coordinator),
        hash_algo=algo,
        none_hash=none_hash,
        hash_example=example,
        hash_lookahead_tokens=lookahead,
        replay_window_tokens=int(getattr(scheduler, "prefix_replay_tokens", 0)),
        extra_keys_form="tagged" if hasattr(_vllm("v1.core.kv_cache_utils"), "to_event_extra_keys") else "plain",
        offload_blocks_per_chunk=blocks_per_chunk(connector),
        lora_paths=dict(lora_paths),
        model_name=read_model_name(scheduler.vllm_config.model_config),
        dp_rank=dp_rank,
        max_model_len=scheduler.max_model_len,
        num_gpu_blocks=pool.num_gpu_blocks,
        dcp_size=int(getattr(scheduler, "dcp_world_size", 1)),
        pcp_size=int(getattr(scheduler, "pcp_world_size", 1)),
        connector=None if connector is None else connector_name(connector),
        connectors=[] if connector is None else connector_names(connector),
        offload_partial_hits=suffix_partial_hits(connector),
        engine_version=vllm_version,
        peer=peer_address(connector),
    )


def read_groups(coordinator: Any) -> list[DeclaredGroup]:
    """Return every KV cache group in vLLM's order; its block size is the effective one, that of its manager."""
    classes = spec_classes(coordinator)
    # A spec group with one flagged member drops its last block as a whole; readers derive that from `eagle` and
    # `spec_class`. From 0.33 on, groups stay flagged where hashes that cover the next tokens make the drop needless.
    eagle = getattr(coordinator, "drop_eagle_group_ids", getattr(coordinator, "eagle_group_ids", ()))
    groups = []
    for group_idx, group in enumerate(coordinator.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = kind_of(spec)
        groups.append(
            DeclaredGroup(
                group_idx=group_idx,
                kind=kind,
                block_size=coordinator.single_type_managers[group_idx].block_size,
                # A full-attention spec may carry the window or chunk of the layers that it replaces, which look-ups
                # ignore.
                sliding_window=window_of(spec) if kind.startswith("sliding_window") else None,
                attention_chunk_size=_number(getattr(spec, "attention_chunk_size", None)) if kind == CHUNKED else None,
                eagle=group_idx in eagle,
                prefix_cacheable=bool(getattr(spec, "prefix_cacheable", True)),
                spec_class=classes.get(group_idx),
            )
        )
    return groups


def offload_groups(coordinator: Any) -> dict[int, OffloadGroup]:
    """Return the facts of each group that raw offloading events lack, by group_idx."""
    return {
        group.group_idx: OffloadGroup(group.block_size, group.kind, group.sliding_window)
        for group in read_groups(coordinator)
    }


def spec_classes(coordinator: Any) -> dict[int, int]:
    """Return for each group_idx the number of its spec group, in the order in which spec groups are looked up.

    Groups that are not looked up with a spec group are absent. An entry of `attention_groups` is a SpecGroup, or a
    plain tuple before 0.23; the second item of both is the group ids.
    """
    entries = getattr(coordinator, "attention_groups", None)
    if entries is not None:
        return {group_idx: spec_class for spec_class, entry in enumerate(entries) for group_idx in entry[1]}
    # A coordinator of a single group has no spec groups; without prefix caching nothing is looked up.
    return {0: 0} if coordinator.block_pool.enable_caching and len(coordinator.single_type_managers) == 1 else {}


def read_align(coordinator: Any, scheduler_block_size: int) -> int | None:
    """Return the tokens of which every hit is a multiple."""
    if len(coordinator.single_type_managers) == 1:
        return int(coordinator.single_type_managers[0].block_size)
    aligned = getattr(coordinator, "_cache_hit_alignment_tokens", None)
    # Before 0.23 the hybrid coordinator aligned to the least common multiple of its block sizes.
    return int(getattr(coordinator, "lcm_block_size", scheduler_block_size) if aligned is None else aligned)


def read_retention(coordinator: Any) -> int | None:
    """Return the retention interval in tokens, or None if every block is kept.

    From 0.23 to 0.28 the value is a setting of the environment.
    """
    if hasattr(coordinator, "retention_interval"):
        return _number(coordinator.retention_interval)
    return _number(getattr(_vllm("envs"), "VLLM_PREFIX_CACHE_RETENTION_INTERVAL", None))


def read_hashing(algo: str | None, hash_block_size: int, lookahead: int = 0) -> tuple[str | None, HashExample | None]:
    """Return NONE_HASH as hex and an example of a block hash.

    Args:
        algo: vLLM's name of the hash algorithm.
        hash_block_size: Tokens of a hashed block.
        lookahead: Tokens after a block that its hash covers; the example includes them.

    Returns:
        (None, None) until the engine has drawn its NONE_HASH, which happens soon after its scheduler is built.
    """
    utils = _vllm("v1.core.kv_cache_utils")
    none_hash = getattr(utils, "NONE_HASH", None)
    if none_hash is None or algo is None:
        return None, None
    token_ids = list(range(hash_block_size + lookahead))
    function = _vllm("utils.hashing").get_hash_fn_by_name(algo)
    if lookahead:
        (example,) = utils.get_request_block_hasher(hash_block_size, function, lookahead)(_Prompt(token_ids))
    else:
        example = utils.hash_block_tokens(function, None, token_ids)
    return bytes(none_hash).hex(), HashExample(token_ids, short_hash(example))


class _Prompt:
    """The attributes of a request that vLLM's block hasher reads, for a prompt of nothing but tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self.all_token_ids = token_ids
        self.num_tokens = len(token_ids)
        self.block_hashes: list[bytes] = []
        self.mm_features: list[Any] = []
        self.lora_request = self.cache_salt = self.prompt_embeds = None


def read_lookahead(scheduler: Any) -> int:
    """Return how many following tokens every block hash also covers; 0 in every vLLM version up to 0.32."""
    manager = scheduler.kv_cache_manager
    for owner in (manager.coordinator, manager, scheduler):
        for name in _LOOKAHEAD_NAMES:
            if isinstance(getattr(owner, name, None), int):
                return int(getattr(owner, name))
    fields = getattr(_vllm("distributed.kv_events").BlockStored, "__struct_fields__", ())
    if "lookahead_token_ids" in fields and scheduler.connector is None and getattr(scheduler, "use_eagle", False):
        # vLLM does not state the number. At least 1 is declared, because a reader must not follow hashes that cover
        # tokens it cannot see.
        return max(1, int(getattr(scheduler, "num_prefill_lookahead", 1)))
    return 0


def read_model_name(model_config: Any) -> str | None:
    """Return the name that requests use: --served-model-name, else the model."""
    served = getattr(model_config, "served_model_name", None)
    if isinstance(served, list):
        served = served[0] if served else None
    return served or getattr(model_config, "model", None)


def kind_of(spec: Any) -> str:
    """Return the kv_cache_spec_kind of a spec, or "unknown"."""
    interface = _vllm("v1.kv_cache_interface")
    if hasattr(interface, "get_kv_cache_spec_kind"):
        return str(interface.get_kv_cache_spec_kind(spec).value)
    kinds = {_kind_by_class(inner) for inner in getattr(spec, "kv_cache_specs", {0: spec}).values()}
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _kind_by_class(spec: Any) -> str:
    return next((_KINDS[base.__name__] for base in type(spec).__mro__ if base.__name__ in _KINDS), "unknown")


def window_of(spec: Any) -> int | None:
    """Return the tokens of a spec's sliding window, or None without one."""
    interface = _vllm("v1.kv_cache_interface")
    if hasattr(interface, "get_kv_cache_spec_sliding_window"):
        return _number(interface.get_kv_cache_spec_sliding_window(spec))
    return _number(getattr(spec, "sliding_window", None))


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
