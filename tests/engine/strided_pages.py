# SPDX-License-Identifier: Apache-2.0
"""Caches in any layout as the pages that a copier moves.

A page is a run of bytes of a block, found from strides alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches, PageRef, PageTensor

# Keys and values, where a cache has them as its first dimension.
KV_HALVES = 2


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache.

    Blocks are the first dimension, or the second one behind a dimension of keys and values. They may be kernel blocks,
    of which several make one block.
    """

    # Several for Mamba: one per kind of state.
    tensors: tuple[torch.Tensor, ...]
    # Bytes of a block with its padding; None: the bytes that the tensors cover.
    page_size_bytes: int | None = None


@dataclass(frozen=True)
class _Run:
    """A run of `width` bytes in each block, of which the first `used` hold data."""

    storage: int
    offset: int
    stride: int
    width: int
    used: int


def strided_pages(
    layers: Mapping[str, torch.Tensor | LayerCache], groups: Sequence[Sequence[str]], num_blocks: int
) -> CanonicalCaches:
    """Return the pages of caches in any layout.

    Args:
        layers: The caches of the layers, by name.
        groups: The names of each group's layers.
        num_blocks: How many blocks the caches have.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    group_runs = []
    for names in groups:
        runs: list[_Run] = []
        for name in names:
            cache = layers[name]
            cache = cache if isinstance(cache, LayerCache) else LayerCache((cache,))
            layer_runs: list[_Run] = []
            for tensor in cache.tensors:
                storage = tensor.untyped_storage()
                storages.setdefault(storage.data_ptr(), storage)
                layer_runs += _runs(tensor, list(storages).index(storage.data_ptr()), num_blocks)
            runs += _padded(_joined(layer_runs), cache.page_size_bytes)
        group_runs.append(_joined(runs))
    # One tensor for each place, as wide as its widest user needs.
    widths: dict[tuple[int, int, int], int] = {}
    for run in itertools.chain.from_iterable(group_runs):
        place = (run.storage, run.offset, run.stride)
        widths[place] = max(widths.get(place, 0), run.width)
    tensors = []
    for (number, offset, stride), width in widths.items():
        storage = list(storages.values())[number]
        empty = torch.empty(0, dtype=torch.int8, device=storage.device)
        view = empty.set_(storage, offset, (num_blocks, width), (stride, 1))
        tensors.append(PageTensor(view, width))
    numbers = {place: number for number, place in enumerate(widths)}
    refs = [[PageRef(numbers[r.storage, r.offset, r.stride], r.used) for r in runs] for runs in group_runs]
    return CanonicalCaches(tensors, refs)


def _runs(tensor: torch.Tensor, storage: int, num_blocks: int) -> Iterator[_Run]:
    element = tensor.element_size()
    dims = [(int(size), int(stride) * element) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    size, stride = dims.pop(1 if dims[0][0] == KV_HALVES else 0)
    ratio, rest = divmod(size, num_blocks)
    assert not rest
    width = element
    outer: list[tuple[int, int]] = []
    # The kernel blocks of one block follow one another.
    for n, step in sorted(((n, step) for n, step in [*dims, (ratio, stride)] if n > 1), key=lambda dim: dim[1]):
        if step == width:
            width *= n
        else:
            outer.append((n, step))
    start = tensor.storage_offset() * element
    for steps in itertools.product(*([step * i for i in range(n)] for n, step in outer)):
        yield _Run(storage, start + sum(steps), stride * ratio, width, width)


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs, with adjacent runs joined and runs at the same place merged."""
    joined: list[_Run] = []
    for run in sorted(runs, key=lambda run: (run.storage, run.stride, run.offset)):
        last = joined[-1] if joined else None
        if last is None or (last.storage, last.stride) != (run.storage, run.stride):
            joined.append(run)
        elif last.offset == run.offset:
            joined[-1] = replace(last, width=max(last.width, run.width), used=max(last.used, run.used))
        elif last.offset + last.width == run.offset:
            joined[-1] = replace(last, width=last.width + run.width, used=last.width + run.used)
        else:
            joined.append(run)
    return joined


def _padded(runs: list[_Run], page: int | None) -> list[_Run]:
    """Return the runs as one page with its padding if they lie within one page, and unchanged otherwise."""
    first, last = runs[0], runs[-1]
    span = last.offset + last.used - first.offset
    if page is None or len({(run.storage, run.stride) for run in runs}) > 1 or span > page:
        return runs
    return [replace(first, width=page, used=span)]
