# SPDX-License-Identifier: Apache-2.0
"""Blocks are copied to slots and back, byte for byte, for every kind of layout, and nothing else is touched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

from kvrouter.engine_patch.offload.memory import copier as copier_module  # noqa: E402
from kvrouter.engine_patch.offload.memory.copier import CpuCopier  # noqa: E402
from kvrouter.engine_patch.offload.memory.device_transfers import DeviceCopy  # noqa: E402
from kvrouter.engine_patch.offload.memory.region import Region  # noqa: E402
from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, Plan, SlotLayout, num_chunks  # noqa: E402
from tests.engine.offload_layouts import LAYOUTS, NUM_BLOCKS, Layout  # noqa: E402
from tests.engine.strided_pages import strided_pages  # noqa: E402

NUM_SLOTS = 20
# Work for a device: a quarter of a second or more.
DEVICE_TURNS, DEVICE_SIZE = 200, 4_096
# The most repetitions of a copy of 64 KiB or more until another thread runs. They take half a second if it never does.
TURNS = 20_000
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
# Slots that the driver has not pinned also work, but are slower.
every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=on_cuda), pytest.param("cuda, not pinned", marks=on_cuda)]
)


class Cache:
    """An engine's caches of random bytes, and a copier to slots of random bytes."""

    def __init__(self, layout: Layout, blocks_per_chunk: int, region: Region, device: str, seed: int = 0) -> None:
        self.layout = layout
        self.device = device.partition(",")[0]
        self.raw = self.storages(seed)
        self.caches = layout.caches(self.raw)
        self.slots = region.rank_tensor()
        self.slot_layout = SlotLayout(self.caches.page_bytes, blocks_per_chunk, region.rank_bytes)
        if device == "cuda":
            assert region.pin()
        self.copier: Any
        if self.device == "cuda":
            from kvrouter.engine_patch.offload.memory.cuda_copier import CudaCopier

            self.copier = CudaCopier(self.caches, self.slot_layout, self.slots, is_pinned=device == "cuda")
        else:
            self.copier = CpuCopier(self.caches, self.slot_layout, self.slots)
        generator = torch.Generator().manual_seed(seed + 1)
        self.slots.copy_(torch.randint(-128, 128, self.slots.shape, dtype=torch.int8, generator=generator))

    def storages(self, seed: int) -> list[Any]:
        """Return random bytes for all of the caches."""
        return [storage.to(self.device) for storage in self.layout.raw(seed)]

    def store(self, plan: Plan) -> int:
        return int(self.copier.store(plan)) if self.device == "cpu" else ended(self.copier.begin_store(plan))

    def load(self, plan: Plan) -> int:
        return int(self.copier.load(plan)) if self.device == "cpu" else ended(self.copier.begin_load(plan))


def ended(copy: DeviceCopy) -> int:
    """Wait for a copy, and return its bytes."""
    copy.wait()
    assert copy.is_done() and copy.seconds() >= 0
    return copy.num_bytes


@contextmanager
def opened(layout: Layout, blocks_per_chunk: int, device: str) -> Iterator[Cache]:
    """Yield caches and the slots of one rank, which have some bytes to spare."""
    rank_bytes = max(layout.block_bytes) * blocks_per_chunk + 7
    region = Region.create_or_open(None, NUM_SLOTS, rank_bytes)
    yield Cache(layout, blocks_per_chunk, region, device)
    region.close()


def part(group: int, blocks: list[int], first: int, slots: list[int]) -> GroupPart:
    return GroupPart(group, np.array(blocks, np.int64), first, np.array(slots, np.int64))


@st.composite
def transfers(draw: st.DrawFn, groups: int, blocks_per_chunk: int) -> tuple[Plan, Plan]:
    """Draw the plan of a store and the plan of a load that moves the same chunks to other blocks.

    The blocks and slots are random, and a group may have none.
    """
    sources = draw(st.permutations(range(NUM_BLOCKS)))
    targets = draw(st.permutations(range(NUM_BLOCKS)))
    slots = draw(st.permutations(range(NUM_SLOTS)))
    stored, loaded = [], []
    for group in range(groups):
        count = draw(st.integers(0, NUM_BLOCKS // groups))
        if not count:
            continue
        first = draw(st.integers(0, 9))
        chunks = num_chunks(count, first, blocks_per_chunk)
        chosen, slots = slots[:chunks], slots[chunks:]
        stored.append(part(group, sources[:count], first, chosen))
        loaded.append(part(group, targets[:count], first, chosen))
        sources, targets = sources[count:], targets[count:]
    return tuple(stored), tuple(loaded)


@every_device
@every_layout
@pytest.mark.parametrize("blocks_per_chunk", [1, 3, 4])
# Examples of each layout and chunk size; all of them together are more than a thousand.
@settings(max_examples=30)
@given(data=st.data(), sizes=st.sampled_from([(1, 2**20), (100, 2**20), (2**20, 2**20), (1, 1), (100, 60)]))
def test_what_was_stored_is_loaded_into_other_blocks_and_nothing_else_changes(
    layout: Layout, blocks_per_chunk: int, device: str, data: st.DataObject, sizes: tuple[int, int]
) -> None:
    stored, loaded = data.draw(transfers(len(layout.groups), blocks_per_chunk))
    with pytest.MonkeyPatch.context() as patch:
        # The pages of a layout are small, so the limits are small too: batches hold one page or several, and all pages
        # or only the larger ones are copied one by one.
        patch.setattr(copier_module, "BATCH_BYTES", sizes[0])
        patch.setattr(copier_module, "DIRECT_BYTES", sizes[1])
        check_round_trip(layout, blocks_per_chunk, device, stored, loaded)


def check_round_trip(layout: Layout, blocks_per_chunk: int, device: str, stored: Plan, loaded: Plan) -> None:
    with opened(layout, blocks_per_chunk, device) as cache:
        original = [storage.clone() for storage in cache.raw]
        blocks = sum(len(group.block_ids) * layout.block_bytes[group.group] for group in stored)

        assert cache.store(stored) == blocks
        assert all(torch.equal(a, b) for a, b in zip(cache.raw, original, strict=True))

        # Fill the caches with other bytes, as in another life of the engine.
        for storage, other in zip(cache.raw, cache.storages(99), strict=True):
            storage.copy_(other)
        expected = [storage.clone() for storage in cache.raw]
        for source, target in zip(stored, loaded, strict=True):
            for before, after in zip(
                layout.blocks(original, source.group), layout.blocks(expected, source.group), strict=True
            ):
                after[torch.from_numpy(target.block_ids)] = before[torch.from_numpy(source.block_ids)]
        slots = cache.slots.clone()

        assert cache.load(loaded) == blocks
        assert all(torch.equal(a, b) for a, b in zip(cache.raw, expected, strict=True))
        assert torch.equal(cache.slots, slots)


@every_device
@every_layout
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_page_lies_where_the_layout_says_and_the_rest_of_the_slots_stays(
    layout: Layout, blocks_per_chunk: int, device: str
) -> None:
    with opened(layout, blocks_per_chunk, device) as cache:
        expected = cache.slots.clone()
        plan = []
        for group, refs in enumerate(cache.caches.group_refs):
            # Blocks 2, 3, 4 of a request: with chunks of four the end of chunk 0 and the beginning of chunk 1.
            slots = [5 * group + 4, 5 * group + 1, 5 * group + 3][: num_chunks(3, 2, blocks_per_chunk)]
            blocks = [3 * group + 2, 3 * group, 3 * group + 1]
            plan.append(part(group, blocks, 2, slots))
            for i, block in enumerate(blocks):
                slot = slots[(2 % blocks_per_chunk + i) // blocks_per_chunk]
                for number, ref in enumerate(refs):
                    start = cache.slot_layout.offset(group, number, (2 + i) % blocks_per_chunk)
                    page = cache.caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]
                    expected[slot, start : start + ref.page_size_bytes] = page
        cache.store(tuple(plan))
        assert torch.equal(cache.slots, expected)


@every_device
def test_a_part_of_a_chunk_is_added_to_what_its_slot_holds(device: str) -> None:
    layout = LAYOUTS[0]
    with opened(layout, 4, device) as cache:
        for block in range(4):
            cache.store((part(0, [block], block, [7]),))
        whole = cache.slots[7].clone()
        cache.store((part(0, [0, 1, 2, 3], 0, [8]),))
        assert torch.equal(whole[:-7], cache.slots[8][:-7])


@every_device
def test_a_plan_of_nothing_copies_nothing(device: str) -> None:
    with opened(LAYOUTS[0], 1, device) as cache:
        assert cache.store(()) == cache.load(()) == 0


@every_device
@pytest.mark.parametrize(
    "wrong",
    [
        part(0, [0, NUM_BLOCKS], 0, [0, 1]),
        part(0, [0, -1], 0, [0, 1]),
        part(0, [0, 1], 0, [0, NUM_SLOTS]),
        part(0, [0, 1], 0, [0, -1]),
        part(0, [0, 1], 0, [0]),
    ],
    ids=["block", "negative block", "slot", "negative slot", "one slot for two chunks"],
)
def test_what_is_not_there_is_refused_and_nothing_is_changed(wrong: GroupPart, device: str) -> None:
    with opened(LAYOUTS[0], 1, device) as cache:
        raw, slots = [storage.clone() for storage in cache.raw], cache.slots.clone()
        for copy in (cache.store, cache.load):
            with pytest.raises((IndexError, ValueError), match=r"\d"):
                copy((part(0, [5], 0, [5]), wrong))
        assert all(torch.equal(a, b) for a, b in zip(cache.raw, raw, strict=True))
        assert torch.equal(cache.slots, slots)


@pytest.mark.parametrize("page_bytes", [4 * 2**10, 32 * 2**10, 256 * 2**10])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_the_interpreter_is_free_while_a_copy_runs(page_bytes: int, direction: str) -> None:
    cache = torch.zeros(16, page_bytes, dtype=torch.int8)
    caches = strided_pages({"layer": cache}, [["layer"]], 16)
    slots = torch.zeros(16, page_bytes, dtype=torch.int8)
    copier = CpuCopier(caches, SlotLayout(caches.page_bytes, 1, page_bytes), slots)
    plan = (part(0, list(range(16)), 0, list(range(15, -1, -1))),)
    begun, stop = threading.Event(), threading.Event()
    stopped: list[bool] = []

    def copy_until_told() -> None:
        begun.set()
        for _ in range(TURNS):
            getattr(copier, direction)(plan)
            if stop.is_set():
                break
        stopped.append(stop.is_set())

    thread = threading.Thread(target=copy_until_told)
    interval = sys.getswitchinterval()
    # No thread is forced to release the interpreter, so this thread continues only if the copy itself releases it.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        begun.wait()
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert stopped == [True]


@on_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda, not pinned"])
def test_a_copy_waits_for_earlier_work_of_the_device_and_for_no_later_work(device: str) -> None:
    """Submit device work before and after a copy, and check that the copy waits for the earlier work alone.

    A store copies the bytes that the engine had computed when it submitted, and earlier work does not write over loaded
    bytes.
    """
    with opened(LAYOUTS[1], 1, device) as cache:
        plan = (part(0, list(range(NUM_BLOCKS)), 0, list(range(NUM_BLOCKS))),)
        held = LAYOUTS[1].block_bytes[0]

        cache.raw[0].fill_(1)
        keep_busy()
        cache.raw[0].fill_(2)
        copy = cache.copier.begin_store(plan)
        after = keep_busy()
        copy.wait()
        assert not after.query(), "the copy waited for what came after it"
        assert bool((cache.slots[:NUM_BLOCKS, :held] == 2).all())

        cache.slots.fill_(3)
        keep_busy()
        cache.raw[0].zero_()
        cache.load(plan)
        assert bool((cache.raw[0] == 3).all())


def keep_busy() -> Any:
    """Queue work on the current stream, and return the event after it."""
    matrix = torch.randn(DEVICE_SIZE, DEVICE_SIZE, device="cuda")
    for _ in range(DEVICE_TURNS):
        matrix = (matrix @ matrix).clamp_(-1, 1)
    return torch.cuda.current_stream().record_event()


def test_slots_and_layouts_that_do_not_fit_are_refused() -> None:
    layout = LAYOUTS[3]
    caches = layout.caches(layout.raw(0))
    slots = torch.zeros(2, 143, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"143 bytes of a slot, the layout takes 144"):
        CpuCopier(caches, SlotLayout(caches.page_bytes, 2, 144), slots)
    with pytest.raises(ValueError, match=r"\(\(70,\),\) bytes, the caches have \(\(72,\),\)"):
        CpuCopier(caches, SlotLayout(((70,),), 2, 140), slots)
