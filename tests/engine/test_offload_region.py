# SPDX-License-Identifier: Apache-2.0
"""The slots' memory as tensors: each rank's own part, over the same bytes that the scheduler process sees."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

from kvrouter.engine_patch.offload.memory.copier import CpuCopier  # noqa: E402
from kvrouter.engine_patch.offload.memory.region import Region, shared_path  # noqa: E402
from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, SlotLayout  # noqa: E402
from tests.engine.offload_layouts import LAYOUTS, NUM_BLOCKS  # noqa: E402

LAYOUT = LAYOUTS[0]
RANK_BYTES = LAYOUT.block_bytes[0]

# A rank in its own process, which stores its blocks 0 and 1 to the slots 2 and 0, and then ends.
WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_offload_region
test_offload_region.work(Path(sys.argv[2]), int(sys.argv[3]))
"""


def work(path: Path, rank: int) -> None:
    region = Region.create_or_open(path, 3, 2 * RANK_BYTES, 2, rank)
    caches = LAYOUT.caches(LAYOUT.raw(rank))
    copier = CpuCopier(caches, SlotLayout(caches.page_bytes, 1, RANK_BYTES), region.rank_tensor())
    copier.store((GroupPart(0, np.array([0, 1]), 0, np.array([2, 0])),))
    del copier
    region.close()


def block_bytes(rank: int, block: int) -> bytes:
    """Return all of a rank's bytes of a block, layer after layer, keys before values."""
    keys_and_values = [layer.view(2, NUM_BLOCKS, -1)[half, block] for layer in LAYOUT.raw(rank) for half in (0, 1)]
    return b"".join(half.numpy().tobytes() for half in keys_and_values)


def test_two_ranks_in_two_processes_fill_a_slot_side_by_side(tmp_path: Path) -> None:
    path = shared_path("engine", tmp_path)
    region = Region.create_or_open(path, 3, 2 * RANK_BYTES, 2, None)
    region.slot(1)[:] = b"\x55" * region.slot_bytes
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(path)]
    workers = [subprocess.Popen([*command, str(rank)]) for rank in (0, 1)]
    assert [worker.wait() for worker in workers] == [0, 0]

    padding = bytes(region.slot_bytes - 2 * RANK_BYTES)
    assert bytes(region.slot(2)) == block_bytes(0, 0) + block_bytes(1, 0) + padding
    assert bytes(region.slot(0)) == block_bytes(0, 1) + block_bytes(1, 1) + padding
    assert bytes(region.slot(1)) == b"\x55" * region.slot_bytes
    region.close()


def test_a_ranks_tensor_is_its_part_of_every_slot_without_a_copy() -> None:
    # Several ranks share this memory as if it were a file.
    memory = Region.create_or_open(None, 3, 12)
    assert memory._memory is not None
    regions = [Region(memory._memory, 3, 4, 3, rank, None, None) for rank in range(3)]
    for rank, region in enumerate(regions):
        tensor = region.rank_tensor()
        assert tensor.dtype is torch.int8
        assert tuple(tensor.shape) == (3, 4)
        assert tensor.stride() == (4_096, 1)
        tensor[1] = rank + 1
    assert bytes(memory.slot(1)[:13]) == bytes([1] * 4 + [2] * 4 + [3] * 4 + [0])
    assert bytes(memory.slot(0)) == bytes(memory.slot(2)) == bytes(4_096)


def test_a_tensor_that_is_still_held_keeps_its_bytes_and_not_the_file(tmp_path: Path) -> None:
    path = shared_path("engine", tmp_path)
    region = Region.create_or_open(path, 2, 8)
    tensor = region.rank_tensor()
    tensor[1] = 7
    region.close()
    assert not path.exists()
    assert tensor[1].tolist() == [7] * 8
    for use in (region.rank_tensor, lambda: region.slot(0)):
        with pytest.raises(ValueError, match=r"closed|released"):
            use()


def test_the_scheduler_process_has_no_part_of_its_own(tmp_path: Path) -> None:
    region = Region.create_or_open(shared_path("engine", tmp_path), 2, 8, 2, None)
    with pytest.raises(ValueError, match="scheduler process"):
        region.rank_tensor()
    region.close()


class Driver:
    """A stand-in for the CUDA runtime, which registers `pieces` pieces and then refuses."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.registered) == self.pieces:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    # This is the size of two slots and a half, but a piece ends with a slot.
    monkeypatch.setattr("kvrouter.engine_patch.offload.memory.region.PIN_BYTES", 10_000)
    return driver


def test_pinning_registers_the_whole_region_once_and_closing_ends_that(driver: Driver) -> None:
    region = Region.create_or_open(None, 5, 8)
    assert region.pin() and region.pin()
    start = region.rank_tensor().data_ptr()
    assert driver.registered == {start: 8_192, start + 8_192: 8_192, start + 16_384: 4_096}
    region.close()
    assert driver.registered == {}


def test_where_the_driver_refuses_nothing_stays_registered(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.pieces = 2
    region = Region.create_or_open(None, 5, 8)
    assert not region.pin()
    assert driver.registered == {}
    assert "does not pin" in caplog.text
    region.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_cuda_driver_pins_the_region_and_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.engine_patch.offload.memory.region.PIN_BYTES", 10_000)
    # The file is in memory, as for engines, because the driver does not pin a file on a disk.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for path in (None, Path(folder) / "slots"):
            region = Region.create_or_open(path, 5, 8)
            assert not region.rank_tensor().is_pinned()
            assert region.pin() and region.pin()
            kept = region.rank_tensor()
            assert kept.is_pinned()
            region.close()
            assert not kept.is_pinned()


def test_without_cuda_pinning_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    region = Region.create_or_open(None, 1, 8)
    assert not region.pin()
    region.close()
