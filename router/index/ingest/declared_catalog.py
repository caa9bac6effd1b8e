# SPDX-License-Identifier: Apache-2.0
"""An engine's declared catalog (`events/patch/messages.py`), translated into the router's terms.

The translation also names the parts of the declaration that the hit rule cannot follow.
"""

from __future__ import annotations

from kvrouter.events.patch.messages import DeclaredCatalog
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.model.kvcache.offload_connectors import effective_connector
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec


def declared_spec(declared: DeclaredCatalog, stated: CatalogSpec) -> CatalogSpec:
    """Return the catalog as the engine declares it, completed by the user's statements where the engine is silent."""
    groups = tuple(
        GroupSpec(
            group_idx=group.group_idx,
            kind=group.kind,
            block_size=group.block_size,
            sliding_window=group.sliding_window,
            attention_chunk_size=group.attention_chunk_size,
            eagle=group.eagle,
            prefix_cacheable=group.prefix_cacheable,
            spec_class=group.spec_class,
        )
        for group in declared.groups
    )
    return CatalogSpec(
        groups=groups or stated.groups,
        hash_block_size=declared.hash_block_size or stated.hash_block_size,
        scheduler_block_size=declared.scheduler_block_size or stated.scheduler_block_size,
        hash_algo=declared.hash_algo or stated.hash_algo,
        none_hash=declared.none_hash or stated.none_hash,
        none_hash_seed=stated.none_hash_seed,
        hash_lookahead_tokens=declared.hash_lookahead_tokens,
        partial_hits=stated.partial_hits if declared.partial_hits is None else declared.partial_hits,
        offload_blocks_per_chunk=declared.offload_blocks_per_chunk or stated.offload_blocks_per_chunk,
        offload_connector=effective_connector(_connectors(declared)) or stated.offload_connector,
        offload_partial_hits=declared.offload_partial_hits,
        whole_windows=stated.whole_windows,
        lora_paths={**stated.lora_paths, **declared.lora_paths},
    )


def _connectors(declared: DeclaredCatalog) -> list[str]:
    # A patch that names only the outermost connector leaves the ones inside a MultiConnector unknown.
    return declared.connectors or ([] if declared.connector is None else [declared.connector])


def declared_problem(declared: DeclaredCatalog) -> str | None:
    """Return why no hit of this engine can be predicted although its groups are known, or None if one can be."""
    if declared.engine not in ENGINES:
        return (
            f"its patch declares an engine that this router does not know ({declared.engine[:40]!r}): update the router"
        )
    if declared.replay_window_tokens:
        return (
            f"it computes hits of up to {declared.replay_window_tokens} tokens again (bounded replay), which the hit rule does not "
            "know; it is served by load alone"
        )
    return None


def contradictions(declared: CatalogSpec, stated: CatalogSpec) -> list[str]:
    """Return the names of the fields that the user stated differently from the engine, whose declaration is used."""
    names = []
    if stated.groups and set(stated.groups) != {_comparable(group) for group in declared.groups}:
        names.append("groups")
    for name in (
        "hash_block_size",
        "scheduler_block_size",
        "hash_algo",
        "none_hash",
        "partial_hits",
        "offload_blocks_per_chunk",
        "offload_connector",
    ):
        value = getattr(stated, name)
        if value is not None and value != getattr(declared, name):
            names.append(name)
    return names


def _comparable(group: GroupSpec) -> GroupSpec:
    """Return the group with only the fields that a user's statement is compared by."""
    return GroupSpec(
        group.group_idx,
        group.kind,
        group.block_size,
        group.sliding_window,
        group.attention_chunk_size,
        group.eagle,
        group.prefix_cacheable,
    )
