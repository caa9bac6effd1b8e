# SPDX-License-Identifier: Apache-2.0
"""Copies in the background: each job ends with one result, even a failed job, and the engine's thread does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

from kvrouter.engine_patch.offload.memory.copier import CpuCopier  # noqa: E402
from kvrouter.engine_patch.offload.memory.region import Region  # noqa: E402
from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, Plan, SlotLayout  # noqa: E402
from kvrouter.engine_patch.offload.memory.transfers import TransferResult, Transfers  # noqa: E402
from tests.engine.offload_layouts import LAYOUTS  # noqa: E402

# Longer than any copy here takes; only a thread whose copy never ends waits this long.
PATIENCE_S = 30.0


def plan(number: int) -> Plan:
    """Return a plan that a `Gate` recognises by its number."""
    return (GroupPart(0, np.array([number]), 0, np.array([0])),)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it never came to this"
        time.sleep(0.001)


class Gate:
    """A copier whose copies each wait for permission, and fail if their number is in `failing`.

    `done` lists the finished copies, in order.
    """

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.failing: set[int] = set()
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def store(self, plan: Plan) -> int:
        return self._copy("store", plan)

    def load(self, plan: Plan) -> int:
        return self._copy("load", plan)

    def _copy(self, what: str, plan: Plan) -> int:
        number = int(plan[0].block_ids[0])
        self.begun.release()
        assert self.allowed.acquire(timeout=PATIENCE_S)
        self.done.append((what, number))
        if number in self.failing:
            raise RuntimeError(f"copy {number}")
        return 10 * number

    def let(self, count: int) -> None:
        self.allowed.release(count)

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


Start = Callable[..., Transfers]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that makes transfers, which are closed in the end with all copies allowed."""
    opened: list[tuple[Transfers, Gate]] = []

    def begin(gate: Gate, **more: Any) -> Transfers:
        transfers = Transfers(gate, **more)
        opened.append((transfers, gate))
        return transfers

    yield begin
    for transfers, gate in opened:
        gate.let(100)
        transfers.close()


def numbers(results: list[TransferResult]) -> list[tuple[int, bool, int]]:
    return [(result.job_id, result.ok, result.num_bytes) for result in results]


def test_a_submission_returns_while_the_copy_waits(start: Start) -> None:
    gate = Gate()
    transfers = start(gate)
    transfers.submit_store(7, plan(1))
    transfers.submit_store(8, plan(2))
    gate.wait_begun()
    # Both copies are under way, neither has ended, and this thread did not wait.
    assert transfers.finished() == []
    gate.let(2)
    transfers.wait([7, 8])
    assert numbers(transfers.finished()) == [(7, True, 10), (8, True, 20)]
    assert transfers.finished() == []


def test_loads_come_before_stores_and_what_is_awaited_before_both(start: Start) -> None:
    gate = Gate()
    transfers = start(gate)
    transfers.submit_store(0, plan(0))
    gate.wait_begun()
    for job, submit in enumerate([transfers.submit_store] * 3 + [transfers.submit_load] * 2, start=1):
        submit(job, plan(job))
    gate.let(1)
    waiting = threading.Thread(target=transfers.wait, args=([3],))
    # Job 4 may have begun before a thread waits; after it, 3 comes before 5.
    gate.wait_begun()
    waiting.start()
    until(lambda: 3 in transfers._awaited)
    gate.let(1)
    gate.let(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    gate.let(100)
    transfers.wait(range(6))
    assert gate.done == [
        ("store", 0),
        ("load", 4),
        ("store", 3),
        ("load", 5),
        ("store", 1),
        ("store", 2),
    ]


def test_a_failed_copy_is_a_result_and_the_next_one_continues(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.failing = {2}
    gate.let(3)
    transfers = start(gate)
    transfers.submit_store(1, plan(1))
    transfers.submit_load(2, plan(2))
    transfers.wait([1, 2])
    transfers.submit_store(3, plan(3))
    transfers.wait([3])
    assert sorted(numbers(transfers.finished())) == [(1, True, 10), (2, False, 0), (3, True, 30)]
    assert "copy 2" in caplog.text


def test_waiting_for_jobs_that_are_not_there_returns(start: Start) -> None:
    gate = Gate()
    gate.let(1)
    transfers = start(gate)
    transfers.wait([])
    transfers.wait([5])
    transfers.submit_store(5, plan(5))
    transfers.wait([4, 5])
    # Job 5 has ended, so waiting returns before its result is taken and after that.
    transfers.wait([5])
    transfers.finished()
    transfers.wait([5])


def test_closing_ends_the_copy_underway_and_fails_the_rest(start: Start) -> None:
    gate = Gate()
    transfers = start(gate)
    transfers.submit_store(1, plan(1))
    gate.wait_begun()
    transfers.submit_store(2, plan(2))
    transfers.submit_load(3, plan(3))
    closing = threading.Thread(target=transfers.close)
    closing.start()
    until(lambda: transfers._closed)
    gate.let(1)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert sorted(numbers(transfers.finished())) == [(1, True, 10), (2, False, 0), (3, False, 0)]
    transfers.submit_store(4, plan(4))
    transfers.wait([4])
    assert numbers(transfers.finished()) == [(4, False, 0)]
    transfers.close()


def test_seconds_are_of_the_copy_by_the_clock_it_is_given(start: Start) -> None:
    ticks = iter([100.0, 100.5])
    gate = Gate()
    gate.let(1)
    transfers = start(gate, clock=lambda: next(ticks))
    transfers.submit_store(1, plan(1))
    transfers.wait([1])
    assert transfers.finished() == [TransferResult(1, True, 10, 0.5)]


def test_blocks_go_to_slots_and_come_back_with_a_real_copier(start: Start) -> None:
    layout = LAYOUTS[0]
    raw = layout.raw(3)
    caches = layout.caches(raw)
    region = Region.create_or_open(None, 4, 4 * layout.block_bytes[0])
    copier = CpuCopier(caches, SlotLayout(caches.page_bytes, 4, region.rank_bytes), region.rank_tensor())
    expected = [block[[0, 1, 2]].clone() for block in layout.blocks(raw, 0)]
    transfers = Transfers(copier)
    transfers.submit_store(1, (GroupPart(0, np.array([0, 1, 2]), 3, np.array([3, 1])),))
    transfers.wait([1])
    for storage in raw:
        storage.zero_()
    transfers.submit_load(2, (GroupPart(0, np.array([9, 4, 6]), 3, np.array([3, 1])),))
    transfers.submit_load(3, (GroupPart(0, np.array([99]), 0, np.array([0])),))
    transfers.wait([2, 3])
    size = 3 * layout.block_bytes[0]
    assert numbers(transfers.finished()) == [(1, True, size), (2, True, size), (3, False, 0)]
    for block, old in zip(layout.blocks(raw, 0), expected, strict=True):
        assert torch.equal(block[[9, 4, 6]], old)
    transfers.close()
    region.close()
