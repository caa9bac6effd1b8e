# SPDX-License-Identifier: Apache-2.0
"""Caches of every layout as pages of bytes: over the same storage, all of a block's bytes and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

from offload_layouts import LAYOUTS, NUM_BLOCKS, Layout, take  # noqa: E402

from kvrouter.engine_patch.offload.memory.canonical import (  # noqa: E402
    MAX_PIECES,
    CanonicalCaches,
    LayerCache,
    canonical_caches,
    from_vllm,
)

N = NUM_BLOCKS
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def pages(caches: CanonicalCaches, group: int) -> list[torch.Tensor]:
    """(num_blocks, bytes) of each of the group's refs."""
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
    # Looking at them changed nothing.
    assert all(torch.equal(a, b) for a, b in zip(raw, before, strict=True))


@every_layout
@pytest.mark.parametrize("block", [0, 5, N - 1])
def test_what_is_written_to_a_page_is_in_that_block_of_the_layers_and_nowhere_else(layout: Layout, block: int) -> None:
    for group in range(len(layout.groups)):
        raw = layout.raw(2)
        wanted = [storage.clone() for storage in raw]
        for layer in layout.blocks(wanted, group):
            # All bits of a block's elements, and of nothing else: torch's own indexing says where they are.
            layer[block] = ~layer[block]
        caches = layout.caches(raw)
        for page in pages(caches, group):
            page[block] = ~page[block]
        assert all(torch.equal(a, b) for a, b in zip(raw, wanted, strict=True))


def test_groups_at_one_place_share_a_tensor_of_which_each_uses_its_own_share() -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "shared")
    caches = layout.caches(layout.raw(0))
    assert [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in caches.group_refs] == [
        [(0, 144), (1, 144)],
        [(0, 144), (1, 144)],
        [(0, 116)],
    ]


def test_a_group_that_uses_more_of_a_shared_page_makes_it_wider() -> None:
    raw = torch.zeros(N * 100, dtype=torch.int8)
    layers = {"a": take(raw, torch.int8, (N, 40), (100, 1)), "b": take(raw, torch.int8, (N, 90), (100, 1))}
    for groups, page_bytes in (([["a"], ["b"]], ((40,), (90,))), ([["b"], ["a"]], ((90,), (40,)))):
        caches = canonical_caches(layers, groups, N)
        assert [page.page_size_bytes for page in caches.tensors] == [90]
        assert caches.page_bytes == page_bytes


def test_layers_of_one_group_at_one_place_are_copied_once() -> None:
    raw = torch.zeros(N * 8, dtype=torch.int8)
    caches = canonical_caches({"a": raw.view(N, 8), "b": raw.view(N, 2, 4)}, [["a", "b"]], N)
    assert caches.page_bytes == ((8,),)


def test_the_layers_of_a_packed_block_are_one_page() -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "packed")
    caches = layout.caches(layout.raw(0))
    assert caches.page_bytes == ((96,), (32,))
    assert [page.tensor.stride(0) for page in caches.tensors] == [140, 140]


def test_layers_one_after_the_other_in_one_storage_stay_apart() -> None:
    raw = torch.zeros(2 * N * 8, dtype=torch.int8)
    layers = {"a": take(raw, torch.int8, (N, 8)), "b": take(raw, torch.int8, (N, 8), offset=N * 8)}
    caches = canonical_caches(layers, [["a", "b"]], N)
    assert caches.page_bytes == ((8, 8),)


def test_a_cache_of_one_block_is_one_page() -> None:
    keys_and_values = torch.arange(2 * 6, dtype=torch.int8).view(2, 1, 6)
    caches = canonical_caches({"a": LayerCache((keys_and_values,), block_dim=1)}, [["a"]], 1)
    assert [page.tensor.tolist() for page in caches.tensors] == [[list(range(12))]]


def test_num_blocks_is_the_configs_not_the_shapes() -> None:
    # The same tensor is 12 blocks of 8 bytes or 4 blocks of three kernel blocks.
    cache = torch.zeros(12, 8, dtype=torch.int8)
    for num_blocks, page in ((12, 8), (4, 24)):
        caches = canonical_caches({"a": cache}, [["a"]], num_blocks)
        assert tuple(caches.tensors[0].tensor.shape) == (num_blocks, page)


def test_a_view_into_a_storage_begins_where_the_view_does() -> None:
    raw = torch.arange(20, dtype=torch.int8)
    caches = canonical_caches({"a": raw[8:].view(4, 3)}, [["a"]], 4)
    assert caches.tensors[0].tensor[0].tolist() == [8, 9, 10]


def test_the_order_of_pages_follows_the_layers_not_their_addresses() -> None:
    """A slot that was written to disk is read by the next life of the engine, whose memory lies elsewhere."""
    rng = random.Random(5)
    sizes = {f"l{i}": 8 * (i + 1) for i in range(6)}
    names = sorted(sizes)
    for _ in range(10):
        # Allocated in any order, in one storage of each or as slices of one.
        order = rng.sample(names, len(names))
        layers = {name: torch.zeros(N, sizes[name], dtype=torch.int8) for name in order}
        caches = canonical_caches(layers, [names], N)
        assert caches.page_bytes == (tuple(sizes[name] for name in names),)


def refused(layers: dict[str, object], num_blocks: int = N, groups: Sequence[Sequence[str]] | None = None) -> str:
    with pytest.raises(ValueError, match=r".") as failure:
        canonical_caches(layers, groups or [list(layers)], num_blocks)
    return str(failure.value)


def test_blocks_that_do_not_divide_are_told_with_both_numbers_and_the_flag() -> None:
    text = refused({"a": torch.zeros(25, 4)})
    assert "(25, 4)" in text and "12 blocks" in text and "--block-size" in text
    text = refused({"a": torch.zeros(2, 25, 4)})
    assert "(2, 25, 4)" in text and "12 blocks" in text and "--block-size" in text
    text = refused({"a": LayerCache((torch.zeros(25, 4),), block_dim=0)})
    assert "25 kernel blocks" in text and "12 blocks" in text and "--block-size" in text


def test_blocks_in_too_many_pieces_are_told_with_both_numbers_and_the_setting() -> None:
    # The tokens of a block lie apart: 65 of them, one more than is copied.
    apart = torch.zeros(MAX_PIECES + 1, N, 4, dtype=torch.int8)
    text = refused({"a": LayerCache((apart,), block_dim=1)})
    assert f"{MAX_PIECES + 1} pieces" in text and f"at most {MAX_PIECES}" in text
    assert "VLLM_KV_CACHE_LAYOUT" in text and "--block-size" in text
    caches = canonical_caches({"a": LayerCache((apart[:MAX_PIECES],), block_dim=1)}, [["a"]], N)
    assert len(caches.tensors) == MAX_PIECES


def test_a_storage_that_is_too_small_is_told_with_both_numbers() -> None:
    # The last block's padding is not there.
    text = refused(
        {"a": LayerCache((take(torch.zeros(N * 10 - 2, dtype=torch.int8), torch.int8, (N, 8), (10, 1)),), 10)}
    )
    assert f"{N} blocks of 10 bytes end at byte {N * 10}" in text and f"has {N * 10 - 2}" in text
    assert "--num-gpu-blocks-override" in text


def test_pages_and_blocks_that_do_not_fit_are_told_with_both_numbers() -> None:
    cache = torch.zeros(N, 8, dtype=torch.int8)
    text = refused({"a": LayerCache((cache,), 10)})
    assert "pages of 10 bytes" in text and "8 bytes apart" in text and "--block-size" in text
    text = refused({"a": LayerCache((cache,), 6)})
    assert "covers 8 bytes" in text and "page has 6" in text


def test_a_dimension_that_may_be_blocks_or_keys_and_values_has_to_be_named() -> None:
    cache = torch.zeros(2, 2, 8)
    assert "block_dim" in refused({"a": cache}, 2)
    for dim, pages_of in ((0, 1), (1, 2)):
        caches = canonical_caches({"a": LayerCache((cache,), block_dim=dim)}, [["a"]], 2)
        assert len(caches.tensors) == pages_of


def test_other_layouts_that_are_none_are_refused() -> None:
    cache = torch.zeros(N, 8)
    assert "no cache" in refused({"a": cache}, groups=[["a", "b"]])
    assert "share their bytes" in refused({"a": cache.unsqueeze(1).expand(N, 3, 8)})
    assert "bytes apart" in refused({"a": torch.zeros(1, 8).expand(N, 8)})
    assert "empty" in refused({"a": torch.zeros(N, 0)})
    assert "0 blocks" in refused({"a": cache}, 0)


def vllm_caches(tensors: list[tuple[torch.Tensor, int]], refs: list[list[tuple[int, int]]]) -> SimpleNamespace:
    """As vLLM 0.32's CanonicalKVCaches."""
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


@pytest.mark.parametrize(
    ("name", "kernel_block_size"),
    # vLLM cuts blocks only where their pages are dense.
    [(name, None) for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")] + [("LBHNC", 4), ("LBNHC", 4)],
)
def test_every_layout_that_vllm_allocates_is_taken(name: str, kernel_block_size: int | None) -> None:
    """As vLLM 0.32 allocates it: allocate_kv_cache in v1/worker/utils.py."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    layout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout[name]
    spec = interface.FullAttentionSpec(block_size=8, num_kv_heads=3, head_size=4, dtype=torch.bfloat16)
    names = ["l0", "l1"]
    size = len(names) * N * spec.page_size_bytes
    layer_stride, block_stride = interface.compute_layout_strides(spec, N, len(names), layout)[:2]
    placed = interface.KVCacheTensor(size, names, layer_stride, block_stride)

    def views(raw: torch.Tensor) -> dict[str, torch.Tensor]:
        found = interface.create_kv_cache_views(raw, spec, N, layout, placed, kernel_block_size)
        return dict(zip(names, found, strict=True))

    raw = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=torch.Generator().manual_seed(4))
    wanted = raw.clone()
    for view in views(wanted).values():
        block = view.view(torch.int16).unflatten(0, (N, -1))[3]
        block.copy_(~block)
    caches = canonical_caches(views(raw), [names], N)
    assert sum(caches.page_bytes[0]) == 2 * spec.page_size_bytes
    for page in pages(caches, 0):
        page[3] = ~page[3]
    assert torch.equal(raw, wanted)
    # One run of bytes where the layers of a block lie together.
    assert len(caches.tensors) == (1 if layout.is_block_outermost else 6 if name == "LHBNC" else 2)


@pytest.mark.parametrize("num_blocks", [None, N])
def test_vllms_tensors_of_other_shapes_are_viewed_anew(num_blocks: int | None) -> None:
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
