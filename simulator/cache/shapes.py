# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of a model as vLLM forms them, and the sizes that follow from them. Pure values.

A geometry is all that the scheduler needs to know of a model: weights, layers and heads do not matter to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "full_attention", "mla_attention", "sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"
]

# Kinds that differ in what a block holds and not in how blocks are kept.
FULL_KINDS: frozenset[Kind] = frozenset({"full_attention", "mla_attention"})
WINDOW_KINDS: frozenset[Kind] = frozenset({"sliding_window", "sliding_window_mla"})


class UnsupportedGeometry(ValueError):
    """Groups that this simulator would not treat as vLLM does."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group, with sizes in tokens. Equal shapes are looked up jointly, as vLLM does for equal specs."""

    kind: Kind
    block_size: int
    sliding_window: int | None = None
    attention_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UnsupportedGeometry(f"a block holds at least 1 token, not {self.block_size}")
        if (self.attention_chunk is not None) != (self.kind == "chunked_local_attention"):
            raise UnsupportedGeometry(
                f"{self.kind} with attention_chunk={self.attention_chunk}: only chunked local attention has a chunk"
            )
        if self.attention_chunk is not None and self.attention_chunk < 1:
            raise UnsupportedGeometry(f"a chunk holds at least 1 token, not {self.attention_chunk}")
        if (self.sliding_window is not None) != (self.kind in WINDOW_KINDS):
            raise UnsupportedGeometry(
                f"{self.kind} with sliding_window={self.sliding_window}: only sliding-window kinds have a window"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UnsupportedGeometry(f"a window holds at least 1 token, not {self.sliding_window}")


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of a model in group_idx order, and how densely window and state checkpoints are kept."""

    name: str
    groups: tuple[GroupShape, ...]
    # In tokens. 0 keeps only the checkpoints at which a repeated or a shared prompt can resume (vLLM's default since
    # 0.29), n > 0 also one checkpoint every n tokens, and None keeps all.
    retention_interval: int | None = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise UnsupportedGeometry("a model has at least one KV cache group")
        sizes = {group.block_size for group in self.groups}
        if any(group.kind == "mamba" for group in self.groups) and len(sizes) > 1:
            # With Mamba, different block sizes lead to hits that end inside a block and to copies on write. Neither is
            # simulated.
            raise UnsupportedGeometry(f"Mamba groups need one block size for all groups, not {sorted(sizes)}")
        if any(group.kind == "chunked_local_attention" for group in self.groups) and len(sizes) > 1:
            # vLLM asserts it (single_type_kv_cache_manager.py, ChunkedLocalAttentionManager).
            raise UnsupportedGeometry(
                f"chunked local attention needs one block size for all groups, not {sorted(sizes)}"
            )
        interval = self.retention_interval
        if interval and not any(group.kind in WINDOW_KINDS or group.kind == "mamba" for group in self.groups):
            raise UnsupportedGeometry(
                f"retention_interval {interval}: only sliding-window and Mamba groups keep less than every block; "
                "leave it at 0"
            )
        if interval is not None and (interval < 0 or interval % self.scheduler_block_size):
            raise UnsupportedGeometry(
                f"retention_interval {interval} is no multiple of the scheduler block size {self.scheduler_block_size}"
            )

    @property
    def hash_block_size(self) -> int:
        """Tokens that each block hash covers: vLLM's gcd of the group block sizes."""
        return math.gcd(*(group.block_size for group in self.groups))

    @property
    def scheduler_block_size(self) -> int:
        """Tokens that every hit length is a multiple of: vLLM's lcm of the group block sizes."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Group indices that are looked up jointly, full attention first. Source: kv_cache_coordinator.py:708."""
        members: dict[GroupShape, list[int]] = {}
        for group_idx, group in enumerate(self.groups):
            members.setdefault(group, []).append(group_idx)
        ordered = sorted(members.items(), key=lambda item: item[0].kind not in FULL_KINDS)
        return tuple(tuple(group_ids) for _, group_ids in ordered)


def llama(block_size: int = 16, retention_interval: int | None = 0) -> Geometry:
    """Return one group: full attention in every layer."""
    return Geometry("llama", (GroupShape("full_attention", block_size),), retention_interval)


def gemma3(
    block_size: int = 16, window: int = 1024, sliding_groups: int = 5, retention_interval: int | None = 0
) -> Geometry:
    """Return five sliding-window groups and one of full attention, as there are five such layers to one."""
    sliding = GroupShape("sliding_window", block_size, window)
    return Geometry(
        "gemma3", (sliding,) * sliding_groups + (GroupShape("full_attention", block_size),), retention_interval
    )


def gpt_oss(block_size: int = 16, window: int = 128, retention_interval: int | None = 0) -> Geometry:
    """Return one sliding-window group and one of full attention, as the layers alternate."""
    groups = (GroupShape("sliding_window", block_size, window), GroupShape("full_attention", block_size))
    return Geometry("gpt-oss", groups, retention_interval)


def qwen3_next(block_size: int = 544, mamba_groups: int = 3, retention_interval: int | None = 0) -> Geometry:
    """Return three Mamba groups and one of full attention, as there are three linear-attention layers to one.

    vLLM raises the block size until an attention page is as large as a Mamba state, hence the odd default.
    """
    groups = (GroupShape("mamba", block_size),) * mamba_groups + (GroupShape("full_attention", block_size),)
    return Geometry("qwen3-next", groups, retention_interval)


def llama4(
    block_size: int = 16, chunk: int = 8192, chunked_groups: int = 3, retention_interval: int | None = 0
) -> Geometry:
    """Return three groups of chunked local attention and one of full, as there are three such layers to one."""
    local = GroupShape("chunked_local_attention", block_size, attention_chunk=chunk)
    groups = (local,) * chunked_groups + (GroupShape("full_attention", block_size),)
    return Geometry("llama4", groups, retention_interval)


def deepseek_v4(block_size: int = 256, window: int = 128, retention_interval: int | None = 0) -> Geometry:
    """Return the five groups of compressed attention beside a sliding window.

    One block of compressed attention holds `block_size` tokens, a block of a compressor's state only a few. vLLM 0.32.0
    makes these groups of 43 layers with the compression ratios 0, 0, 4, 128, 4, ...
    (kv_cache_utils.py:1860 _get_packed_kv_cache_groups): two of sliding windows, in blocks of a quarter of the size;
    the compressed attention and its indexer; the states of the compressors by 4 (of 8 tokens) and by 128.
    """
    sliding = GroupShape("sliding_window_mla", max(block_size // 4, 1), window)
    by_4 = GroupShape("sliding_window_mla", max(block_size // 64, 1), 8)
    by_128 = GroupShape("sliding_window_mla", max(block_size // 32, 1), 128)
    groups = (sliding, sliding, GroupShape("mla_attention", block_size), by_4, by_128)
    return Geometry("deepseek-v4", groups, retention_interval)


SHAPES: dict[str, Callable[..., Geometry]] = {
    "llama": llama,
    "gemma3": gemma3,
    "gpt-oss": gpt_oss,
    "qwen3-next": qwen3_next,
    "llama4": llama4,
    "deepseek-v4": deepseek_v4,
}


def make_geometry(
    name: str, *, block_size: int | None = None, window: int | None = None, retention_interval: int | None = 0
) -> Geometry:
    """Return the geometry of the shape called `name`, with the shape's own sizes for those that are None.

    Raises UnsupportedGeometry.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise UnsupportedGeometry(f"there is no shape {name!r}; take one of {', '.join(SHAPES)}")
    sizes: dict[str, int] = {}
    if block_size is not None:
        sizes["block_size"] = block_size
    if window is not None:
        if not any(group.kind in WINDOW_KINDS for group in shape().groups):
            raise UnsupportedGeometry(f"{name} has no sliding-window group, so leave the window out")
        sizes["window"] = window
    return shape(retention_interval=retention_interval, **sizes)
