# SPDX-License-Identifier: Apache-2.0
"""Caches of every layout as pages of bytes, which share the storage and hold all bytes of a block and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

from kvrouter.engine_patch.offload.memory.canonical import CanonicalCaches, from_vllm  # noqa: E402
from tests.engine.offload_layouts import LAYOUTS, NUM_BLOCKS, Layout, take  # noqa: E402

N = NUM_BLOCKS
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def pages(caches: CanonicalCaches, group: int) -> list[Any]:
    """Return a view of (num_blocks, bytes) for each of the group's refs."""
    return [caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in caches.group_refs[group]]


@every_layout
def test_tensors_are_int8_pages_over_the_layers_own_storage(layout: Layout) -> None:
    raw = layout.raw(1)
    before = [storage.clone() for storage in raw]
    caches = layout.caches(raw)
    assert len(caches.tensors) == layout.num_tensors
    storages = {storage.untyped_storage().data_ptr() for storage in raw}
    for page in caches.tensors:
        assert page.tensor.dtype is torch.int8
        assert tuple(page.tensor.shape) == (N, page.page_size_bytes)
        assert page.tensor.stride(1) == 1
        assert page.tensor.untyped_storage().data_ptr() in storages
    assert caches.page_bytes == tuple(tuple(ref.page_size_bytes for ref in refs) for refs in caches.group_refs)
    assert tuple(sum(refs) for refs in caches.page_bytes) == layout.block_bytes
    # Building the views has changed nothing.
    assert all(torch.equal(a, b) for a, b in zip(raw, before, strict=True))


@every_layout
@pytest.mark.parametrize("block", [0, 5, N - 1])
def test_what_is_written_to_a_page_is_in_that_block_of_the_layers_and_nowhere_else(layout: Layout, block: int) -> None:
    for group in range(len(layout.groups)):
        raw = layout.raw(2)
        expected = [storage.clone() for storage in raw]
        for layer in layout.blocks(expected, group):
            # Flip all bits of the block's elements and no others; torch's own indexing says where they are.
            layer[block] = ~layer[block]
        caches = layout.caches(raw)
        for page in pages(caches, group):
            page[block] = ~page[block]
        assert all(torch.equal(a, b) for a, b in zip(raw, expected, strict=True))


def vllm_caches(tensors: list[tuple[Any, int]], refs: list[list[tuple[int, int]]]) -> SimpleNamespace:
    """Return caches in the form of vLLM 0.32's CanonicalKVCaches."""
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=page) for tensor, page in tensors],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=number, page_size_bytes=page, mapping=None) for number, page in group]
            for group in refs
        ],
    )


def test_vllms_own_caches_are_taken_as_they_are() -> None:
    whole, packed = (
        torch.zeros(N, 16, dtype=torch.int8),
        take(torch.zeros(N * 30, dtype=torch.int8), torch.int8, (N, 20), (30, 1)),
    )
    caches = from_vllm(vllm_caches([(whole, 16), (packed, 20)], [[(0, 12), (1, 20)], [(0, 16)]]), N)
    assert caches.tensors[0].tensor is whole
    assert caches.tensors[1].tensor is packed
    assert caches.page_bytes == ((12, 20), (16,))


def test_vllms_classes_are_what_we_take() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    tensor = torch.zeros(N, 16, dtype=torch.int8)
    theirs = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(tensor, 16)],
        [[base.CanonicalKVCacheRef(0, 12)], [base.CanonicalKVCacheRef(0, 16)]],
    )
    caches = from_vllm(theirs)
    assert caches.page_bytes == ((12,), (16,))


@pytest.mark.parametrize("num_blocks", [None, N])
def test_vllms_tensors_of_other_shapes_are_viewed_again(num_blocks: int | None) -> None:
    halves = torch.arange(N * 2 * 6, dtype=torch.int16).view(N, 2, 6)
    kernel = torch.arange(4 + N * 3 * 4, dtype=torch.int32)[4:].view(N * 3, 4)
    padded_rows = torch.zeros(N, 10, dtype=torch.bfloat16)[:, :7]
    theirs = vllm_caches([(halves, 24), (kernel, 48), (padded_rows, 20)], [[(0, 24), (1, 48), (2, 14)]])
    caches = from_vllm(theirs, num_blocks)
    assert [tuple(page.tensor.shape) for page in caches.tensors] == [(N, 24), (N, 48), (N, 20)]
    assert all(page.tensor.dtype is torch.int8 for page in caches.tensors)
    for page, cache in zip(caches.tensors, (halves, kernel, padded_rows), strict=True):
        assert page.tensor.data_ptr() == cache.data_ptr()
    caches.tensors[1].tensor[2] = -1
    assert kernel[6:9].eq(-1).all() and kernel[5].ge(0).all() and kernel[9].ge(0).all()


def test_vllms_tensors_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros(25, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"25 rows of 4 bytes.*12 blocks of 4 bytes.*--block-size"):
        from_vllm(vllm_caches([(cache, 4)], [[(0, 4)]]), N)
    with pytest.raises(ValueError, match=r"25 rows of 4 bytes.*blocks of 8 bytes.*--block-size"):
        from_vllm(vllm_caches([(cache, 8)], [[(0, 8)]]))
    with pytest.raises(ValueError, match=r"uses 5 bytes of tensor 0, whose pages have 4"):
        from_vllm(vllm_caches([(cache, 4)], [[(0, 5)]]))
    # The storage ends before the last block's padding.
    short = take(torch.zeros(N * 10 - 2, dtype=torch.int8), torch.int8, (N, 8), (10, 1))
    with pytest.raises(
        ValueError, match=r"12 blocks of 10 bytes end at byte 120, .* has 118.*--num-gpu-blocks-override"
    ):
        from_vllm(vllm_caches([(short, 10)], [[(0, 8)]]), N)
