# SPDX-License-Identifier: Apache-2.0
"""Small synthetic KV caches in every layout that engines use, with odd sizes where a layout allows them.

A layout is a set of views over raw storages. Only its `blocks` says which bytes a block holds, in torch's own indexing,
so that tests need no strides, pages or pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches
from tests.engine.strided_pages import LayerCache, strided_pages

Views = Mapping[str, torch.Tensor | LayerCache]

# The blocks of every layout. The number is not 2, because a dimension of 2 may be keys and values.
NUM_BLOCKS = 12


@dataclass(frozen=True)
class Layout:
    name: str
    # Bytes of each raw storage.
    storages: tuple[int, ...]
    views: Callable[[Sequence[torch.Tensor]], Views]
    groups: tuple[tuple[str, ...], ...]
    # How many tensors the finished caches have.
    num_tensors: int
    # Bytes of a block, per group.
    block_bytes: tuple[int, ...]

    def raw(self, seed: int) -> list[torch.Tensor]:
        """Return storages of random bytes."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator) for size in self.storages]

    def caches(self, raw: Sequence[torch.Tensor]) -> CanonicalCaches:
        return strided_pages(self.views(raw), self.groups, NUM_BLOCKS)

    def blocks(self, raw: Sequence[torch.Tensor], group: int) -> list[torch.Tensor]:
        """Return views of the group's layers whose first dimension counts blocks.

        Their elements are integers of the same size, so that a comparison compares bytes.
        """
        views = self.views(raw)
        layers = []
        for name in self.groups[group]:
            view = views[name]
            for tensor in view.tensors if isinstance(view, LayerCache) else (view,):
                whole = tensor.view(INTEGERS[tensor.element_size()])
                by_block = whole.movedim(1, 0) if whole.shape[0] == 2 else whole
                layers.append(by_block.unflatten(0, (NUM_BLOCKS, -1)))
        return layers


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def take(
    raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None = None, offset: int = 0
) -> torch.Tensor:
    """Return a view of raw bytes, which is contiguous without strides.

    Args:
        raw: The storage.
        dtype: The type of the view's elements.
        shape: The shape of the view.
        stride: The strides, in elements.
        offset: Where the view begins, in bytes.
    """
    element = torch.empty(0, dtype=dtype).element_size()
    strides = tuple(stride) if stride is not None else torch.empty(shape, device="meta").stride()
    empty = torch.empty(0, dtype=dtype, device=raw.device)
    return empty.set_(raw.untyped_storage(), offset // element, tuple(shape), strides)


def kv_first(raw: Sequence[torch.Tensor]) -> Views:
    return {f"l{i}": take(raw[i], torch.bfloat16, (2, NUM_BLOCKS, 4, 3, 8)) for i in range(2)}


def blocks_first(raw: Sequence[torch.Tensor]) -> Views:
    return {"l0": take(raw[0], torch.float16, (NUM_BLOCKS, 2, 4, 3, 8))}


def kv_first_in_blocks(raw: Sequence[torch.Tensor]) -> Views:
    """Return a cache whose first dimension is keys and values, but which keeps those of a block together.

    A layer beside Mamba layers has this layout.
    """
    half = 4 * 3 * 8
    return {"l0": take(raw[0], torch.bfloat16, (2, NUM_BLOCKS, 4, 3, 8), (half, 2 * half, 24, 8, 1))}


def mla(raw: Sequence[torch.Tensor]) -> Views:
    return {"l0": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 4, 9))}


def padded_pages(raw: Sequence[torch.Tensor]) -> Views:
    """Return pages of 100 bytes, of which 72 are used."""
    return {"l0": LayerCache((take(raw[0], torch.bfloat16, (NUM_BLOCKS, 4, 9), (50, 9, 1)),), 100)}


def padded_without_size(raw: Sequence[torch.Tensor]) -> Views:
    return {"l0": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 4, 9), (50, 9, 1))}


def packed(raw: Sequence[torch.Tensor]) -> Views:
    """Return blocks of three layers (48, 48 and 32 bytes) and 12 bytes of padding; the last layer is its own group."""
    return {
        "l0": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 4, 6), (70, 6, 1)),
        "l1": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 4, 6), (70, 6, 1), 48),
        "l2": take(raw[0], torch.float32, (NUM_BLOCKS, 8), (35, 1), 96),
    }


def packed_heads(raw: Sequence[torch.Tensor]) -> Views:
    """Return blocks with heads outside of layers, so that a layer's block has as many pieces as there are heads."""
    heads, layers, row = 3, 2, 10
    stride = (heads * layers * row, layers * row, 1)
    return {f"l{i}": take(raw[0], torch.int16, (NUM_BLOCKS, heads, row), stride, 2 * i * row) for i in range(layers)}


def heads_first(raw: Sequence[torch.Tensor]) -> Views:
    return {"l0": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 3, 4, 8), (32, NUM_BLOCKS * 32, 8, 1))}


def kernel_blocks(raw: Sequence[torch.Tensor]) -> Views:
    """Return caches in which four kernel blocks of 2 tokens make a block of 8."""
    return {
        "l0": take(raw[0], torch.bfloat16, (NUM_BLOCKS * 4, 2, 2, 6)),
        "l1": take(raw[1], torch.bfloat16, (2, NUM_BLOCKS * 4, 2, 6)),
    }


def mamba(raw: Sequence[torch.Tensor]) -> Views:
    """Return the convolution (36 bytes) and the state (80 bytes) of two layers, in pages of 116 and 128 bytes."""
    return {
        f"l{i}": LayerCache(
            (
                take(raw[i], torch.bfloat16, (NUM_BLOCKS, 3, 6), (page // 2, 6, 1)),
                take(raw[i], torch.float32, (NUM_BLOCKS, 4, 5), (page // 4, 5, 1), 36),
            ),
            page,
        )
        for i, page in enumerate((116, 128))
    }


def mamba_states(raw: Sequence[torch.Tensor]) -> Views:
    """Return a page of two states with a gap of 12 bytes between them, each in its own tensor."""
    states = (
        take(raw[0], torch.bfloat16, (NUM_BLOCKS, 3, 6), (64, 6, 1)),
        take(raw[0], torch.float32, (NUM_BLOCKS, 4, 5), (32, 5, 1), 48),
    )
    return {"l0": LayerCache(states)}


def shared(raw: Sequence[torch.Tensor]) -> Views:
    """Return three groups over the same two storages: attention, sliding window, and Mamba with padding."""
    page = 144
    states = (
        take(raw[0], torch.bfloat16, (NUM_BLOCKS, 3, 6), (page // 2, 6, 1)),
        take(raw[0], torch.float32, (NUM_BLOCKS, 4, 5), (page // 4, 5, 1), 36),
    )
    return {
        "full": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 2, 4, 9)),
        "full2": take(raw[1], torch.bfloat16, (NUM_BLOCKS, 2, 4, 9)),
        "window": take(raw[0], torch.int8, (NUM_BLOCKS * 2, 8, 9)),
        "window2": take(raw[1], torch.int8, (NUM_BLOCKS * 2, 8, 9)),
        "mamba": LayerCache(states, page),
    }


def different_pages(raw: Sequence[torch.Tensor]) -> Views:
    """Return layers of one group with pages of 24, 72 and twice 15 bytes, the last of an odd size."""
    return {
        "l0": take(raw[0], torch.bfloat16, (NUM_BLOCKS, 4, 3)),
        "l1": take(raw[1], torch.float32, (NUM_BLOCKS, 2, 9)),
        "l2": take(raw[2], torch.uint8, (2, NUM_BLOCKS, 5, 3)),
    }


N = NUM_BLOCKS
LAYOUTS = [
    Layout("kv first", (N * 384, N * 384), kv_first, (("l0", "l1"),), 4, (768,)),
    Layout("blocks first", (N * 384,), blocks_first, (("l0",),), 1, (384,)),
    Layout("kv first, blocks together", (N * 384,), kv_first_in_blocks, (("l0",),), 1, (384,)),
    Layout("MLA", (N * 72,), mla, (("l0",),), 1, (72,)),
    Layout("padded pages", (N * 100,), padded_pages, (("l0",),), 1, (72,)),
    Layout("padded pages, size not given", (N * 100,), padded_without_size, (("l0",),), 1, (72,)),
    Layout("packed", (N * 140,), packed, (("l0", "l1"), ("l2",)), 2, (96, 32)),
    Layout("packed, heads outside", (N * 120,), packed_heads, (("l0", "l1"),), 1, (120,)),
    Layout("packed, heads outside, one layer", (N * 120,), packed_heads, (("l1",),), 3, (60,)),
    Layout("heads first", (N * 192,), heads_first, (("l0",),), 3, (192,)),
    Layout("kernel blocks", (N * 192, N * 192), kernel_blocks, (("l0", "l1"),), 3, (384,)),
    Layout("Mamba", (N * 116, N * 128), mamba, (("l0",), ("l1",)), 2, (116, 116)),
    Layout("Mamba states apart", (N * 128,), mamba_states, (("l0",),), 2, (116,)),
    Layout(
        "shared", (N * 144, N * 144), shared, (("full", "full2"), ("window", "window2"), ("mamba",)), 2, (288, 288, 116)
    ),
    Layout("different pages", (N * 24, N * 72, N * 30), different_pages, (("l0", "l1", "l2"),), 4, (126,)),
]
