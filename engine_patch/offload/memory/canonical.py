# SPDX-License-Identifier: Apache-2.0
"""Every layer's KV cache seen as `(num_blocks, page bytes)` int8 over the same storage: what a copier moves.

An engine lays its caches out in many ways: keys and values one after the other or block by block, several layers within
one block, pages with padding, blocks cut into smaller ones for the kernels, Mamba states as views over one page, one
storage for several groups. All of them are strides, so nothing is decided by an engine's or a layer's kind: the bytes
of a block are found from the strides of the tensors, as few *pieces* as they come in, and each piece is a page of a
tensor of its own. Pieces that lie side by side in each block become one, and pieces at the same place are the same
tensor, whichever groups they belong to.

Invariant: the order of tensors and refs follows from names and strides alone, never from addresses. It is the order of
the bytes in a slot, and a slot may have been written to disk by an earlier life of the engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Keys and values of 32 heads, with heads outside of blocks: more than any rank has. Where there are more pieces, it is
# tokens that lie apart, and copying them one by one would cost more than computing them again.
MAX_PIECES = 64

# Keys and values, where a cache has them as its first dimension.
KV_HALVES = 2

BLOCK_SIZE_ADVICE = "set --block-size to a multiple of the attention kernel's block size"


@dataclass(frozen=True)
class PageTensor:
    """tensor: int8 (num_blocks, page_size_bytes); its rows may lie further apart than they are long."""

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True)
class PageRef:
    """A group's share in a tensor: the first page_size_bytes of each row, the rest being padding or another group's."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True)
class CanonicalCaches:
    """tensors, and for each group the refs that together hold a block of it. Tensors at one place are one tensor."""

    tensors: list[PageTensor]
    group_refs: list[list[PageRef]]

    @property
    def page_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Per group, per ref: bytes of a page, as SlotLayout wants them."""
        return tuple(tuple(ref.page_size_bytes for ref in refs) for refs in self.group_refs)


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache as the engine has it, where the tensors alone do not say everything.

    tensors: one, or several (Mamba: one per kind of state).
    page_size_bytes: of a block with its padding; None: the bytes that the tensors cover. block_dim: which dimension of
    the tensors counts blocks; None: the first, or the second behind one of keys and values.
    """

    tensors: tuple[torch.Tensor, ...]
    page_size_bytes: int | None = None
    block_dim: int | None = None


@dataclass(frozen=True)
class _Piece:
    """`width` bytes of each block, of which the first `used` hold something. Numbers are bytes within the storage."""

    storage: int
    offset: int
    stride: int
    width: int
    used: int


@dataclass
class _Storages:
    """Storages by the order in which they were first seen, since their addresses differ from one life to the next."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)

    def number(self, tensor: torch.Tensor) -> int:
        key = (str(tensor.device), int(tensor.untyped_storage().data_ptr()))
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[key]


def canonical_caches(
    layers: Mapping[str, torch.Tensor | Sequence[torch.Tensor] | LayerCache],
    groups: Sequence[Sequence[str]],
    num_blocks: int,
) -> CanonicalCaches:
    """The caches of all groups as pages.

    layers: each layer's cache by name; groups: the names of each group's layers; num_blocks: of the engine's cache
    config, since a tensor's shape may count kernel blocks. Raises ValueError for a layout whose blocks are no pages,
    with the numbers and the setting to change.
    """
    if num_blocks < 1:
        raise ValueError(f"a KV cache of {num_blocks} blocks: num_blocks comes from the engine's cache config")
    storages = _Storages()
    group_pieces = []
    for names in groups:
        pieces: list[_Piece] = []
        for name in names:
            if name not in layers:
                raise ValueError(f"layer {name} of a KV cache group has no cache among {sorted(layers)}")
            pieces += _layer_pieces(name, layers[name], num_blocks, storages)
        group_pieces.append(_joined(pieces))
    return _merged(group_pieces, num_blocks, storages)


def from_vllm(kv_caches: Any, num_blocks: int | None = None) -> CanonicalCaches:
    """vLLM's CanonicalKVCaches as ours. Source: vLLM 0.32 v1/kv_offload/base.py.

    kv_caches: has tensors (tensor, page_size_bytes) and group_data_refs (tensor_idx, page_size_bytes). A tensor that is
    not 2-D int8 is viewed again: its first dimension counts blocks, or kernel blocks when they are smaller than the
    page. num_blocks: of the cache config, when the caller has it. Raises ValueError when pages and blocks do not fit.
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


def _layer_pieces(
    name: str, cache: torch.Tensor | Sequence[torch.Tensor] | LayerCache, num_blocks: int, storages: _Storages
) -> list[_Piece]:
    if not isinstance(cache, LayerCache):
        cache = LayerCache((cache,) if isinstance(cache, torch.Tensor) else tuple(cache))
    pieces: list[_Piece] = []
    for tensor in cache.tensors:
        dim = _block_dim(name, tensor, num_blocks) if cache.block_dim is None else cache.block_dim
        pieces += _tensor_pieces(name, tensor, dim, num_blocks, storages.number(tensor))
    pieces = _joined(pieces)
    if len(pieces) > MAX_PIECES:
        raise ValueError(_too_many(name, len(pieces)))
    return pieces if cache.page_size_bytes is None else _padded(name, pieces, cache.page_size_bytes)


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """0, or 1 behind a dimension of keys and values."""
    shape = tuple(tensor.shape)
    first = bool(shape) and shape[0] > 0 and shape[0] % num_blocks == 0
    second = len(shape) > 1 and shape[0] == KV_HALVES and shape[1] > 0 and shape[1] % num_blocks == 0
    if first and second:
        raise ValueError(
            f"layer {name} of shape {shape} has {num_blocks} blocks in its first or in its second dimension: give block_dim"
        )
    if not first and not second:
        raise ValueError(f"layer {name} of shape {shape} does not divide into {num_blocks} blocks: {BLOCK_SIZE_ADVICE}")
    return 0 if first else 1


def _tensor_pieces(name: str, tensor: torch.Tensor, block_dim: int, num_blocks: int, storage: int) -> Iterator[_Piece]:
    """The runs of bytes that a block has in a tensor."""
    element = tensor.element_size()
    dims = [(int(size), int(stride) * element) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if any(size == 0 for size, _ in dims):
        raise ValueError(f"layer {name} of shape {tuple(tensor.shape)} is empty")
    size, stride = dims.pop(block_dim)
    ratio, rest = divmod(size, num_blocks)
    if rest:
        raise ValueError(
            f"layer {name}: {size} kernel blocks do not divide into {num_blocks} blocks: {BLOCK_SIZE_ADVICE}"
        )
    # The kernel blocks of one block follow one another.
    dims = sorted(((n, step) for n, step in [*dims, (ratio, stride)] if n > 1), key=lambda dim: dim[1])
    run = element
    outer: list[tuple[int, int]] = []
    for n, step in dims:
        if step < run:
            raise ValueError(f"layer {name} of strides {tensor.stride()} has elements that share their bytes")
        if step == run:
            run *= n
        else:
            outer.append((n, step))
    count = math.prod(n for n, _ in outer)
    if count > MAX_PIECES:
        raise ValueError(_too_many(name, count))
    block_stride = stride * ratio
    if num_blocks == 1:
        block_stride = max(block_stride, run)
    if block_stride < run:
        raise ValueError(f"layer {name}: blocks lie {block_stride} bytes apart, but {run} bytes in a row belong to one")
    start = tensor.storage_offset() * element
    for steps in itertools.product(*([step * i for i in range(n)] for n, step in outer)):
        yield _Piece(storage, start + sum(steps), block_stride, run, run)


def _too_many(name: str, count: int) -> str:
    return (
        f"layer {name}: the bytes of a block lie in {count} pieces, at most {MAX_PIECES} are copied: set VLLM_KV_CACHE_LAYOUT to a "
        "layout that keeps a block together (LBNHC), or --block-size to the attention kernel's block size"
    )


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Pieces in the order of their storages and offsets, those side by side in every block as one; a place that comes
    twice, once."""
    joined: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.storage, piece.stride, piece.offset)):
        last = joined[-1] if joined else None
        if last is None or (last.storage, last.stride) != (piece.storage, piece.stride):
            joined.append(piece)
        elif last.offset == piece.offset:
            joined[-1] = _Piece(
                last.storage, last.offset, last.stride, max(last.width, piece.width), max(last.used, piece.used)
            )
        elif last.offset + last.width == piece.offset:
            joined[-1] = _Piece(
                last.storage, last.offset, last.stride, last.width + piece.width, last.width + piece.used
            )
        else:
            joined.append(piece)
    return joined


def _padded(name: str, pieces: list[_Piece], page: int) -> list[_Piece]:
    """The pieces as one page with its padding, where they lie within one; else as they are."""
    covered = sum(piece.used for piece in pieces)
    if covered > page:
        raise ValueError(
            f"layer {name}: a block covers {covered} bytes, its page has {page}: give the page size of the cache config"
        )
    first, last = pieces[0], pieces[-1]
    span = last.offset + last.used - first.offset
    if len({(piece.storage, piece.stride) for piece in pieces}) > 1 or span > page:
        return pieces
    if page > first.stride:
        raise ValueError(
            f"layer {name}: pages of {page} bytes, but blocks lie {first.stride} bytes apart: set --block-size so that the page "
            "sizes of all groups agree"
        )
    return [_Piece(first.storage, first.offset, first.stride, page, span)]


def _merged(group_pieces: Sequence[Sequence[_Piece]], num_blocks: int, storages: _Storages) -> CanonicalCaches:
    """One tensor for each place, as wide as its widest user needs."""
    widths: dict[tuple[int, int, int], int] = {}
    for piece in itertools.chain.from_iterable(group_pieces):
        place = (piece.storage, piece.offset, piece.stride)
        widths[place] = max(widths.get(place, 0), piece.width)
    tensors = []
    for (storage, offset, stride), width in widths.items():
        view = _page_view(storages.tensors[storage], f"the pages at byte {offset}", offset, (num_blocks, width), stride)
        tensors.append(PageTensor(view, width))
    numbers = {place: number for number, place in enumerate(widths)}
    refs = [[PageRef(numbers[p.storage, p.offset, p.stride], p.used) for p in pieces] for pieces in group_pieces]
    return CanonicalCaches(tensors, refs)


def _distinct(refs: Sequence[PageRef]) -> list[PageRef]:
    """A tensor that several layers of a group share is copied once."""
    widest: dict[int, int] = {}
    for ref in refs:
        widest[ref.tensor_idx] = max(widest.get(ref.tensor_idx, 0), ref.page_size_bytes)
    return [PageRef(number, width) for number, width in widest.items()]


def _page_view(tensor: torch.Tensor, what: str, offset: int, shape: tuple[int, int], stride: int) -> torch.Tensor:
    """int8 over the storage of tensor, from byte offset on. Raises ValueError when the storage ends before the last
    page."""
    storage = tensor.untyped_storage()
    end = offset + (shape[0] - 1) * stride + shape[1]
    if end > storage.nbytes():
        raise ValueError(
            f"{what}: {shape[0]} blocks of {shape[1]} bytes end at byte {end}, their storage has {storage.nbytes()}: num_blocks "
            "must be that of the engine's cache config (--num-gpu-blocks-override)"
        )
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage, offset, shape, (stride, 1))
