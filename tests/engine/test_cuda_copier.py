# SPDX-License-Identifier: Apache-2.0
"""`CudaCopier` submits the right copies in the right order, on a double of the device that runs nothing by itself."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from kvrouter.engine_patch.offload.memory import cuda_copier  # noqa: E402
from kvrouter.engine_patch.offload.memory.device_transfers import DeviceTransfers  # noqa: E402
from kvrouter.engine_patch.offload.memory.region import Region  # noqa: E402
from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, SlotLayout  # noqa: E402
from tests.engine.cuda_double import CudaDouble  # noqa: E402
from tests.engine.offload_layouts import LAYOUTS, Layout  # noqa: E402

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@every_layout
def test_blocks_go_to_slots_and_come_back_behind_the_engines_work(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = CudaDouble()
    double.install(monkeypatch)
    raw = layout.raw(3)
    caches = layout.caches(raw)
    region = Region.create_or_open(None, 4 * len(layout.groups), 4 * max(layout.block_bytes))
    slots = region.rank_tensor()
    copier = cuda_copier.CudaCopier(caches, SlotLayout(caches.page_bytes, 4, region.rank_bytes), slots, is_pinned=False)
    transfers = DeviceTransfers(copier)
    size = sum(3 * block_bytes for block_bytes in layout.block_bytes)

    def plan(blocks: list[int]) -> tuple[GroupPart, ...]:
        return tuple(
            GroupPart(group, np.array(blocks) + 4 * group, 3, np.array([4 * group + 3, 4 * group + 1]))
            for group in range(len(layout.groups))
        )

    # The engine computes the blocks only after the store was submitted: the store must wait for that.
    final = [storage.clone() for storage in raw]
    for storage in raw:
        storage.zero_()

    def compute() -> None:
        for storage, computed in zip(raw, final, strict=True):
            storage.copy_(computed)

    def zero() -> None:
        for storage in raw:
            storage.zero_()

    double.computing.work.append(compute)
    transfers.submit_store(1, plan([0, 1, 2]))
    assert transfers.finished() == []
    transfers.wait([1])
    expected = [
        block[np.array([0, 1, 2]) + 4 * group]
        for group in range(len(layout.groups))
        for block in layout.blocks(final, group)
    ]
    # A load waits for the engine's zeroing of the blocks that it fills.
    double.computing.work.append(zero)
    transfers.submit_load(2, plan([3, 0, 1]))
    transfers.wait([2])
    # The work that the engine had queued before the load ran before it, and runs only once.
    double.computing.run(len(double.computing.work))
    assert [(result.job_id, result.ok, result.num_bytes) for result in transfers.finished()] == [
        (1, True, size),
        (2, True, size),
    ]
    found = [
        block[np.array([3, 0, 1]) + 4 * group]
        for group in range(len(layout.groups))
        for block in layout.blocks(raw, group)
    ]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    transfers.close()
    region.close()


@pytest.mark.parametrize(("page_bytes", "step"), [(8, 8), (16, 16), (4_096, 4_096), (5_000, 8_192), (16_384, 8_192)])
def test_a_program_of_the_kernel_copies_a_page_or_8_kib_at_a_time(page_bytes: int, step: int) -> None:
    assert cuda_copier.step_bytes(page_bytes) == step
