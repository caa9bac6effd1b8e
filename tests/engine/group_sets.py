# SPDX-License-Identifier: Apache-2.0
"""The KV cache group layouts of the oracle tests: vLLM's own specs, and the catalog that declares them.

A layout whose facts all cross the wire is registered without a catalog, so that the router has to learn it. A layout
that needs more facts (EAGLE flags, chunk sizes, its own hash block size) is registered with a catalog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)

# From 0.33 on, with EAGLE and no KV connector, a hash also covers the token after its block, and no block is dropped.
LOOKAHEAD_HASHES = hasattr(VllmConfig, "num_hash_lookahead_tokens")

_ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def full(block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **_ATTENTION)


def window(tokens: int, block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **_ATTENTION)


def chunked(tokens: int, block_size: int = 16) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=tokens, **_ATTENTION)


def mla(block_size: int = 16) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block_size, **_ATTENTION)


def window_mla(tokens: int, block_size: int = 16) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(block_size=block_size, sliding_window=tokens, **_ATTENTION)


def mamba(block_size: int = 16) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align")


@dataclass(frozen=True)
class GroupSet:
    """One layout of KV cache groups."""

    name: str
    specs: tuple[KVCacheSpec, ...]
    # Small compared to the working set, so that blocks are evicted all the time.
    num_blocks: int
    # Tokens between the states that sparse groups keep: 0 keeps only the latest state, None keeps all.
    retention: int | None = 0
    # Whether speculative decoding is on. Without a flagged group, vLLM treats every group as flagged.
    eagle: bool = False
    eagle_groups: frozenset[int] = frozenset()
    # vLLM's `prefix_match_unit`: the hash block size, where it is not the gcd of the block sizes.
    match_unit: int | None = None
    # Whether the layout is registered with a catalog.
    declared: bool = False

    @property
    def block_size(self) -> int:
        """The value of `CacheConfig.block_size`: the Mamba block if there is one, else the largest block."""
        states = [spec.block_size for spec in self.specs if isinstance(spec, MambaSpec)]
        return max(states or [spec.block_size for spec in self.specs])

    @property
    def has_mamba(self) -> bool:
        return any(isinstance(spec, MambaSpec) for spec in self.specs)

    @property
    def scheduler_block_size(self) -> int:
        return math.lcm(*(spec.block_size for spec in self.specs))

    def flagged(self, group_idx: int) -> bool:
        return self.eagle and (not self.eagle_groups or group_idx in self.eagle_groups)

    def drops(self, group_idx: int, *, connector: bool = False) -> bool:
        """Return whether hits of this group drop a block for EAGLE, in an engine with or without a KV connector."""
        return self.flagged(group_idx) and (connector or not LOOKAHEAD_HASHES)

    def catalog(self, *, connector: bool = False, **extra: Any) -> dict[str, Any]:
        """Return the catalog that declares this layout in `POST /register`."""
        groups = []
        for group_idx, spec in enumerate(self.specs):
            group = {
                "group_idx": group_idx,
                "kind": get_kv_cache_spec_kind(spec).value,
                "block_size": spec.block_size,
                "eagle": self.drops(group_idx, connector=connector),
            }
            if isinstance(spec, SlidingWindowSpec):
                group["sliding_window"] = spec.sliding_window
            if isinstance(spec, ChunkedLocalAttentionSpec):
                group["attention_chunk_size"] = spec.attention_chunk_size
            groups.append(group)
        catalog: dict[str, Any] = {"groups": groups, "scheduler_block_size": self.scheduler_block_size, **extra}
        if self.match_unit is not None:
            catalog["hash_block_size"] = self.match_unit
        if (
            self.eagle
            and LOOKAHEAD_HASHES
            and not connector
            and not any(isinstance(s, FullAttentionSpec) for s in self.specs)
        ):
            # The router learns it from dense root blocks, which windows and states alone do not have.
            catalog["hash_lookahead_tokens"] = 1
        return catalog


FIRST = frozenset({0})
SECOND = frozenset({1})

GPU_SETS = (
    # One group of each kind.
    GroupSet("full", (full(),), 64),
    GroupSet("window", (window(64),), 48),
    GroupSet("mamba", (mamba(),), 18),
    GroupSet("chunked", (chunked(64),), 48, declared=True),
    GroupSet("mla", (mla(),), 64),
    GroupSet("window-mla", (window_mla(48),), 44),
    # Hybrids, sparse (retention 0) and dense (None), and in between.
    GroupSet("full+window", (full(), window(64)), 110),
    GroupSet("full+window dense", (full(), window(64)), 130, retention=None),
    GroupSet("full+window every 64", (full(), window(40)), 110, retention=64),
    GroupSet("full+mamba", (full(), mamba()), 90),
    GroupSet("full+mamba dense", (full(), mamba()), 110, retention=None),
    GroupSet("3-way", (full(), window(64), mamba()), 140),
    GroupSet("3-way dense", (full(), window(64), mamba()), 160, retention=None),
    GroupSet("5 windows+full", (*(window(64),) * 5, full()), 240),
    GroupSet("window+mamba+full", (window(48), mamba(), full()), 140),
    # Block sizes that differ.
    GroupSet("full 32+window 16", (full(32), window(48, 16)), 80),
    GroupSet("full 16+full 32", (full(16), full(32)), 90, retention=None),
    GroupSet("full 16+mamba 64, partial hits", (full(16), mamba(64)), 80),
    # No prompt fills a Mamba block, so only partial entries show it.
    GroupSet("full 16+mamba 528, partial hits", (full(16), mamba(528)), 80),
    GroupSet("full 528+mamba 528, hash 16", (full(528), mamba(528)), 50, match_unit=16),
    GroupSet("full 32+mamba 32, hash 16, learned", (full(32), mamba(32)), 50, match_unit=16),
    GroupSet("full 32+mamba 32, hash 16", (full(32), mamba(32)), 50, match_unit=16, declared=True),
    # EAGLE.
    GroupSet("eagle full", (full(),), 64, eagle=True, declared=True),
    GroupSet("eagle window", (window(64),), 52, eagle=True, declared=True),
    GroupSet("eagle full, window flagged", (full(), window(64)), 120, eagle=True, eagle_groups=SECOND, declared=True),
    GroupSet("eagle full flagged, window", (full(), window(64)), 120, eagle=True, eagle_groups=FIRST, declared=True),
    GroupSet("eagle all flagged", (full(), window(64), window(32)), 170, eagle=True, declared=True),
    GroupSet("eagle all flagged, mixed", (full(32), window(48, 16)), 90, eagle=True, declared=True, retention=None),
    GroupSet("eagle full+mamba", (full(), mamba()), 100, eagle=True, declared=True),
    GroupSet("eagle partial hits", (full(16), mamba(64)), 80, eagle=True, declared=True),
)


@dataclass(frozen=True)
class OffloadSet:
    """A layout whose engine has a CPU tier of `cpu_chunks` chunks over all groups."""

    group_set: GroupSet
    cpu_chunks: int
    blocks_per_chunk: int = 1
    self_describing: bool = False

    # A chunk's bytes are rounded up to a page, and these layouts' chunks are smaller than one.
    _CHUNK_BYTES = 4096

    @property
    def name(self) -> str:
        events = "self-describing" if self.self_describing else "placeholder"
        return f"cpu {self.group_set.name}, {events}, {self.blocks_per_chunk} a chunk"

    def connector_config(self) -> dict[str, Any]:
        return {
            "cpu_bytes_to_use": self.cpu_chunks * self._CHUNK_BYTES,
            "blocks_per_chunk": self.blocks_per_chunk,
            "self_describing_kv_events": self.self_describing,
        }

    def catalog(self) -> dict[str, Any] | None:
        """Return the catalog that has to be declared, or None.

        The wire does not carry the number of blocks per chunk, so a number above 1 has to be declared. Otherwise, the
        layout alone decides.
        """
        if self.blocks_per_chunk > 1:
            return self.group_set.catalog(connector=True, offload_blocks_per_chunk=self.blocks_per_chunk)
        return self.group_set.catalog(connector=True) if self.group_set.declared else None


_FULL = GroupSet("full", (full(),), 48)
_WINDOW = GroupSet("full+window", (full(), window(64)), 80)
_DENSE = GroupSet("full+window 40 dense", (full(), window(40)), 90, retention=None)
_MAMBA = GroupSet("full+mamba", (full(), mamba()), 64)
_FIVE = GroupSet("5 windows+full", (*(window(64),) * 5, full()), 200)
_MIXED = GroupSet("full 32+window 16", (full(32), window(48, 16)), 64)
_TAIL = GroupSet("full 32+mamba 32, hash 16", (full(32), mamba(32)), 44, match_unit=16, declared=True)
_EAGLE = GroupSet(
    "eagle full, window flagged", (full(), window(64)), 100, eagle=True, eagle_groups=SECOND, declared=True
)
_EAGLE_FULL = GroupSet("eagle full", (full(),), 48, eagle=True, eagle_groups=FIRST, declared=True)
_THREE = GroupSet("3-way", (full(), window(64), mamba()), 110)

OFFLOAD_SETS = (
    OffloadSet(_FULL, 120),
    OffloadSet(_FULL, 120, self_describing=True),
    OffloadSet(_FULL, 60, blocks_per_chunk=2),
    OffloadSet(_FULL, 60, blocks_per_chunk=2, self_describing=True),
    OffloadSet(_WINDOW, 150),
    OffloadSet(_WINDOW, 150, self_describing=True),
    OffloadSet(_WINDOW, 80, blocks_per_chunk=2, self_describing=True),
    OffloadSet(_WINDOW, 60, blocks_per_chunk=3),
    OffloadSet(_DENSE, 150),
    OffloadSet(_MAMBA, 110),
    OffloadSet(_MAMBA, 110, self_describing=True),
    OffloadSet(_FIVE, 260),
    OffloadSet(_FIVE, 260, self_describing=True),
    OffloadSet(_MIXED, 110),
    OffloadSet(_THREE, 150),
    OffloadSet(_TAIL, 90),
    OffloadSet(_TAIL, 90, self_describing=True),
    OffloadSet(_EAGLE, 150),
    OffloadSet(_EAGLE_FULL, 120),
)


@dataclass(frozen=True)
class SimpleSet:
    """A layout whose engine runs a SimpleCPUOffloadConnector with `cpu_blocks` blocks on the CPU."""

    group_set: GroupSet
    cpu_blocks: int
    # Whether blocks go to the CPU when they are about to leave the GPU; otherwise they go as they are computed.
    lazy: bool = False

    CONNECTOR = "SimpleCPUOffloadConnector"
    _BLOCK_BYTES = 4096

    @property
    def name(self) -> str:
        return f"simple {self.group_set.name}, {self.cpu_blocks} {'lazy' if self.lazy else 'eager'}"

    def connector_config(self) -> dict[str, Any]:
        return {"cpu_bytes_to_use": self.cpu_blocks * self._BLOCK_BYTES, "lazy_offload": self.lazy}

    def catalog(self) -> dict[str, Any] | None:
        return self.group_set.catalog(connector=True) if self.group_set.declared else None


_SIX = GroupSet("4 windows+mamba+full", (*(window(64),) * 4, mamba(), full()), 230)
_FOUR = GroupSet("2 full+2 windows", (full(), window(40), full(), window(96)), 170, retention=None)
_PARTIAL = GroupSet("full 16+mamba 64, partial hits", (full(16), mamba(64)), 72)
_CHUNKED = GroupSet("full+chunked", (full(), chunked(64)), 100, declared=True)
_CHUNKED_WINDOW = GroupSet("full+chunked+window", (full(), chunked(48), window(64)), 150, declared=True)
_EAGLE_PARTIAL = GroupSet("eagle partial hits", (full(16), mamba(64)), 76, eagle=True, declared=True)
_EAGLE_ALL = GroupSet("eagle all flagged", (full(), window(64), window(32)), 160, eagle=True, declared=True)
_EAGLE_MAMBA = GroupSet("eagle full+mamba", (full(), mamba()), 90, eagle=True, declared=True)

SIMPLE_SETS = (
    SimpleSet(_FULL, 120),
    SimpleSet(_FULL, 70),
    SimpleSet(_FULL, 120, lazy=True),
    SimpleSet(GroupSet("mla", (mla(),), 48), 110),
    SimpleSet(_WINDOW, 150),
    SimpleSet(_WINDOW, 110),
    SimpleSet(_WINDOW, 150, lazy=True),
    SimpleSet(_DENSE, 170),
    SimpleSet(_DENSE, 170, lazy=True),
    SimpleSet(GroupSet("full+window every 64", (full(), window(40)), 90, retention=64), 160),
    SimpleSet(GroupSet("mla+window-mla", (mla(), window_mla(48)), 80), 140),
    SimpleSet(_MAMBA, 120),
    SimpleSet(_MAMBA, 85),
    SimpleSet(_MAMBA, 120, lazy=True),
    SimpleSet(GroupSet("full+mamba dense", (full(), mamba()), 90, retention=None), 150),
    SimpleSet(_THREE, 170),
    SimpleSet(_THREE, 170, lazy=True),
    SimpleSet(GroupSet("3-way dense", (full(), window(64), mamba()), 140, retention=None), 200),
    SimpleSet(_FIVE, 280),
    SimpleSet(_FIVE, 280, lazy=True),
    SimpleSet(_SIX, 280),
    SimpleSet(_FOUR, 260),
    SimpleSet(GroupSet("window+mamba+full", (window(48), mamba(), full()), 120), 180),
    SimpleSet(_MIXED, 120),
    SimpleSet(_MIXED, 120, lazy=True),
    SimpleSet(GroupSet("full 16+full 32", (full(16), full(32)), 80, retention=None), 140),
    SimpleSet(GroupSet("full 16+window 32", (full(16), window(64, 32)), 80), 130),
    SimpleSet(_PARTIAL, 120),
    SimpleSet(_PARTIAL, 120, lazy=True),
    SimpleSet(_TAIL, 100),
    SimpleSet(_TAIL, 100, lazy=True),
    SimpleSet(_CHUNKED, 160),
    SimpleSet(_CHUNKED_WINDOW, 220, lazy=True),
    SimpleSet(_EAGLE_FULL, 120),
    SimpleSet(_EAGLE, 160),
    SimpleSet(_EAGLE_ALL, 240),
    SimpleSet(_EAGLE_MAMBA, 150),
    SimpleSet(_EAGLE_PARTIAL, 130),
)
