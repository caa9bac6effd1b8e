# SPDX-License-Identifier: Apache-2.0
"""The KV cache group layouts that each version of vLLM runs through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

_ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


@dataclass(frozen=True)
class Group:
    kind: str
    block_size: int = 16
    window: int | None = None

    def spec(self) -> Any:
        if self.kind == "full_attention":
            return FullAttentionSpec(block_size=self.block_size, **_ATTENTION)
        if self.kind == "sliding_window":
            return SlidingWindowSpec(block_size=self.block_size, sliding_window=self.window, **_ATTENTION)
        return MambaSpec(
            block_size=self.block_size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )


@dataclass(frozen=True)
class Layout:
    """The groups and tiers of one engine's cache."""

    name: str
    groups: tuple[Group, ...]
    # Small compared to the working set, so that blocks are evicted all the time.
    num_blocks: int
    # The size of the CPU tier over all groups; 0: no offloading.
    cpu_chunks: int = 0
    self_describing: bool = False
    eagle_groups: frozenset[int] = frozenset()
    retention: int | None = 0
    # The value of VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
    int_hashes: bool = True

    @property
    def block_size(self) -> int:
        """The value of `CacheConfig.block_size`: the Mamba block if there is one, else the largest block."""
        states = [group.block_size for group in self.groups if group.kind == "mamba"]
        return max(states or [group.block_size for group in self.groups])


FULL = Group("full_attention")
FULL_32 = Group("full_attention", 32)
WINDOW = Group("sliding_window", 16, 64)
MAMBA = Group("mamba")
MIXED = (FULL_32, Group("sliding_window", 16, 48))

LAYOUTS = (
    Layout("full", (FULL,), 64),
    Layout("full+window", (FULL, WINDOW), 110),
    Layout("full+window dense", (FULL, WINDOW), 130, retention=None),
    Layout("3-way", (FULL, WINDOW, MAMBA), 140),
    Layout("full 32+window 16", MIXED, 80),
    # Up to 0.23 the hash of the larger block is the hashes of its two halves, one after the other.
    Layout("full 32+window 16, hashes as bytes", MIXED, 80, int_hashes=False),
    Layout("full 16+mamba 64", (FULL, Group("mamba", 64)), 100, retention=None),
    Layout("eagle, window flagged", (FULL, WINDOW), 120, eagle_groups=frozenset({1})),
    # Two long requests that wait for their loads must fit, because vLLM 0.20 lets them hold their blocks meanwhile.
    Layout("cpu full", (FULL,), 96, cpu_chunks=140),
)
# From 0.21 on the OffloadingConnector takes several groups.
HYBRID_OFFLOAD = (
    Layout("cpu full+window", (FULL, WINDOW), 80, cpu_chunks=150),
    Layout("cpu full+window, self-describing", (FULL, WINDOW), 80, cpu_chunks=150, self_describing=True),
    Layout("cpu full+window, hashes as bytes", (FULL, WINDOW), 80, cpu_chunks=150, int_hashes=False),
    Layout("cpu full 32+window 16", MIXED, 64, cpu_chunks=110),
)
# From 0.23 on the OffloadingConnector takes Mamba groups too.
MAMBA_OFFLOAD = (Layout("cpu 3-way", (FULL, WINDOW, MAMBA), 110, cpu_chunks=150),)


def layouts(version: tuple[int, int]) -> tuple[Layout, ...]:
    """Return the layouts that this version of vLLM can run."""
    hybrid = HYBRID_OFFLOAD if version >= (0, 21) else ()
    return LAYOUTS + hybrid + (MAMBA_OFFLOAD if version >= (0, 23) else ())
