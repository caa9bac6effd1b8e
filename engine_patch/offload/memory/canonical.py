# SPDX-License-Identifier: Apache-2.0
"""Every KV cache of an engine as a `(num_blocks, page bytes)` int8 view of the same storage, which a copier moves.

Invariant: the order of tensors and refs is vLLM's, which follows from the layers' names, never from addresses. It is
the order of the bytes in a slot, and a slot may have been written to disk by an earlier process of the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_SIZE_ADVICE = "set --block-size to a multiple of the attention kernel's block size"


@dataclass(frozen=True)
class PageTensor:
    """A tensor of pages."""

    # int8 (num_blocks, page_size_bytes); its rows may be further apart than they are long.
    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True)
class PageRef:
    """A group's share in a tensor: the first page_size_bytes of each row; the rest is padding or another group's."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True)
class CanonicalCaches:
    """All caches of an engine. Tensors at the same address are one tensor."""

    tensors: list[PageTensor]
    # For each group, the refs that together hold one of its blocks.
    group_refs: list[list[PageRef]]

    @property
    def page_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of a page for each ref of each group, as `SlotLayout` takes them."""
        return tuple(tuple(ref.page_size_bytes for ref in refs) for refs in self.group_refs)


def from_vllm(kv_caches: Any, num_blocks: int | None = None) -> CanonicalCaches:
    """Convert vLLM's CanonicalKVCaches.

    Source: vLLM 0.32 v1/kv_offload/base.py.

    Args:
        kv_caches: Has `tensors` (tensor, page_size_bytes) and `group_data_refs` (tensor_idx, page_size_bytes). A tensor
            that is not 2-D int8 gets a new view: its first dimension counts blocks, or kernel blocks if these are
            smaller than the page.
        num_blocks: The number in the cache config, if the caller has it.

    Raises:
        ValueError: The pages and blocks of a tensor do not fit each other.
    """
    tensors = []
    for number, canonical in enumerate(kv_caches.tensors):
        tensor, page = canonical.tensor, int(canonical.page_size_bytes)
        stride = tensor.stride(0) * tensor.element_size()
        per_block = max(1, page // stride) if tensor.shape[0] > 1 else 1
        rows, rest = divmod(int(tensor.shape[0]), per_block)
        if rest or (per_block > 1 and page % stride) or rows != (num_blocks or rows):
            raise ValueError(
                f"tensor {number} has {tensor.shape[0]} rows of {stride} bytes, which are not {num_blocks or 'whole'} blocks of "
                f"{page} bytes: {BLOCK_SIZE_ADVICE}"
            )
        if tensor.dtype is not torch.int8 or tensor.ndim != 2 or tuple(tensor.shape) != (rows, page):
            start = tensor.storage_offset() * tensor.element_size()
            tensor = _page_view(tensor, f"tensor {number}", start, (rows, page), stride * per_block)
        tensors.append(PageTensor(tensor, page))
    refs = [
        _distinct([PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]) for refs in kv_caches.group_data_refs
    ]
    for ref in itertools.chain.from_iterable(refs):
        if ref.page_size_bytes > tensors[ref.tensor_idx].page_size_bytes:
            raise ValueError(
                f"a group uses {ref.page_size_bytes} bytes of tensor {ref.tensor_idx}, whose pages have "
                f"{tensors[ref.tensor_idx].page_size_bytes}"
            )
    return CanonicalCaches(tensors, refs)


def _distinct(refs: Sequence[PageRef]) -> list[PageRef]:
    """Return one ref for each tensor, so that a tensor that several layers of a group share is copied once."""
    widest: dict[int, int] = {}
    for ref in refs:
        widest[ref.tensor_idx] = max(widest.get(ref.tensor_idx, 0), ref.page_size_bytes)
    return [PageRef(number, width) for number, width in widest.items()]


def _page_view(tensor: torch.Tensor, what: str, offset: int, shape: tuple[int, int], stride: int) -> torch.Tensor:
    """Return an int8 view of a tensor's storage, from byte `offset` on.

    Raises ValueError if the storage ends before the last page.
    """
    storage = tensor.untyped_storage()
    end = offset + (shape[0] - 1) * stride + shape[1]
    if end > storage.nbytes():
        raise ValueError(
            f"{what}: {shape[0]} blocks of {shape[1]} bytes end at byte {end}, their storage has {storage.nbytes()}: num_blocks "
            "must be that of the engine's cache config (--num-gpu-blocks-override)"
        )
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage, offset, shape, (stride, 1))
