# SPDX-License-Identifier: Apache-2.0
"""The declared catalog of an SGLang scheduler: its cache's components as groups, in the protocol's terms.

The engine's name in the catalog says by which rule hits follow from it.
Source: SGLang 0.5.23 srt/mem_cache/unified_cache/components/swa.py, mamba.py, unified_radix_cache.py.
"""

from __future__ import annotations

import hashlib
import importlib
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from kvrouter.engine_patch.sglang.tree_residency import TreeGroup
from kvrouter.events.patch.messages import DeclaredCatalog, DeclaredGroup, HashExample

# Groups in the order of their numbers: the name of SGLang's component, the kind, and whether a node of the radix tree
# holds one state for its end (Mamba) instead of tokens.
COMPONENTS = (("FULL", "full_attention", False), ("SWA", "sliding_window", False), ("MAMBA", "mamba", True))

# SGLang's host tier, in place of a KV connector.
HICACHE = "HiCache"

# Adapters that a catalog names, the ones that came last: more than an engine keeps loaded, and some 100 KB.
MAX_ADAPTERS = 1_024

# The prefix of a cache salt when it is hashed in place of the first page's parent.
SALT_TAG = b"sglang-cache-salt-v1\0"

ALGO, BIGRAM_ALGO = "sglang", "sglang_bigram"


class UnknownTree(Exception):
    """A cache whose hits these groups do not explain."""


def component_types(cache: Any) -> Mapping[int, Any]:
    """Return the type of each of SGLang's components of a cache, by the component's number."""
    return {int(component): component for component in cache.components}


def read_groups(cache: Any) -> list[TreeGroup]:
    """Return the components of a cache. Raise UnknownTree for an unknown component."""
    components = {component.name: component for component in component_types(cache).values()}
    known_names = {name for name, _, _ in COMPONENTS}
    if unknown := sorted(components.keys() - known_names):
        raise UnknownTree(f"the cache has components that are not known: {', '.join(unknown)}")
    groups = []
    for group_idx, (name, kind, ends) in enumerate(COMPONENTS):
        if name not in components:
            continue
        window = None
        if name == "SWA":
            driver = cache.components[components[name]]
            if not getattr(driver, "gates_prefix_match", True):
                # The windows belong to a request, so no hit depends on them.
                continue
            window = int(driver.sliding_window_size)
        groups.append(TreeGroup(group_idx, int(components[name]), kind, window, ends))
    return groups


def read_catalog(cache: Any, groups: list[TreeGroup], dp_rank: int, version: str, model: str | None) -> DeclaredCatalog:
    """Return the catalog of a cache: the facts that predict its hits, and the LoRA adapters that requests used."""
    core = cache.tree_core
    page = int(core.page_size)
    bigrams = bool(core.is_eagle)
    tokens = list(range(page + bigrams))
    return DeclaredCatalog(
        groups=[
            DeclaredGroup(
                group_idx=group.group_idx,
                kind=group.kind,
                block_size=page,
                sliding_window=group.window,
                spec_class=number,
            )
            for number, group in enumerate(groups)
        ],
        hash_block_size=page,
        scheduler_block_size=page,
        align=page,
        partial_hits=False,
        connector=HICACHE if core.enable_hicache else None,
        lora_paths={name: extra_key for extra_key, name in list(adapters_of(core).items())[-MAX_ADAPTERS:]},
        hash_algo=BIGRAM_ALGO if bigrams else ALGO,
        # A chain of hashes has no root hash of its own.
        none_hash="",
        hash_example=HashExample(tokens, first_page_hash(tokens, page, bigrams)),
        model_name=model,
        dp_rank=dp_rank,
        engine="sglang",
        engine_version=version,
    )


def adapters_of(core: Any) -> Mapping[str, str]:
    """Return the names of adapters that requests have used, by the `extra_key` that separates their prompts."""
    recorder = core.kv_events
    # The Rust core's recorder has them in a private attribute.
    lora_names: Any = recorder.lora_names if hasattr(recorder, "lora_names") else recorder._lora_names
    names: Mapping[str, str] = lora_names._names
    return names


def first_page_hash(tokens: list[int], page: int, bigrams: bool) -> int:
    """Return the hash of the first page, as the engine computes it."""
    keys = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    utils = importlib.import_module("sglang.srt.mem_cache.utils")
    key = keys.RadixKey(array("q", tokens), is_bigram=bigrams)
    return int(utils.get_hash_str(key, None, page_size=page)[0][:16], 16)


def digests_of(core: Any) -> Callable[[Any], tuple[list[str], bytes | None]]:
    """Return a function that returns the digests of a node's pages and the pages' namespace.

    The digests are those of the cache's own events. The namespace is that of an adapter in SGLang's default format,
    whether the engine knows the adapter's name or not.
    """
    recorder = core.kv_events

    def digests(node: Any) -> tuple[list[str], bytes | None]:
        return list(recorder._node_event_hash_values(node)), seed_of(node.key.extra_key)

    return digests


def digests_after(core: Any) -> Callable[[Any, str | None], list[str]]:
    """Return a function that hashes the pages of a key as events do, behind a page with a given digest.

    Without a digest, the function hashes from the beginning of the prompt.
    """
    page = int(core.page_size)
    hash_pages = importlib.import_module("sglang.srt.mem_cache.utils").get_hash_str

    def digests(key: Any, last: str | None) -> list[str]:
        if last is None and key.cache_salt is not None:
            last = hashlib.sha256(SALT_TAG + key.cache_salt.encode()).hexdigest()
        return list(hash_pages(key, last, page_size=page))

    return digests


def seed_of(extra_key: str | None) -> bytes | None:
    """Return the namespace of prompts with this `extra_key`, or None for prompts without a namespace."""
    events = importlib.import_module("sglang.srt.disaggregation.kv_events")
    seed: bytes | None = events.kv_event_namespace_seed(extra_key=extra_key, cache_salt=None)
    return seed


def is_python_core(core: Any) -> bool:
    """Return whether a core is SGLang's Python core."""
    return hasattr(core, "_node_arena") and hasattr(core, "_register_node")
