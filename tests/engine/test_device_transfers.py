# SPDX-License-Identifier: Apache-2.0
"""Copies that a device makes: submitted in order, polled without waiting, each with one result, even a failed one.

The device here has the streams and events that the transfers use, and runs when the test says so.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

from kvrouter.engine_patch.offload.memory.device_transfers import DeviceTransfers  # noqa: E402
from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, Plan  # noqa: E402


def plan(number: int) -> Plan:
    """Return a plan that the device recognises by its number."""
    return (GroupPart(0, np.array([number]), 0, np.array([0])),)


class Copy:
    """A copy on the device."""

    def __init__(self, device: Device, stream: deque[Copy], number: int) -> None:
        self.device, self.stream, self.number = device, stream, number
        self.num_bytes = 10 * number

    def is_done(self) -> bool:
        self._check()
        return self not in self.stream

    def wait(self) -> None:
        self._check()
        self.device.waits.append(self.number)
        while self in self.stream:
            self.device.run(self.stream)

    def seconds(self) -> float:
        assert self not in self.stream
        return 0.5

    def _check(self) -> None:
        if self.number in self.device.failing:
            raise RuntimeError(f"copy {self.number}")


class Device:
    """A device with one stream for each direction; `ended` lists its copies in the order in which they ended."""

    def __init__(self) -> None:
        self.stores: deque[Copy] = deque()
        self.loads: deque[Copy] = deque()
        self.failing: set[int] = set()
        self.refused: set[int] = set()
        self.ended: list[int] = []
        # The copies for which somebody waited while they were under way or after.
        self.waits: list[int] = []

    def begin_store(self, plan: Plan) -> Copy:
        return self._begin(self.stores, plan)

    def begin_load(self, plan: Plan) -> Copy:
        return self._begin(self.loads, plan)

    def _begin(self, stream: deque[Copy], plan: Plan) -> Copy:
        number = int(plan[0].block_ids[0])
        if number in self.refused:
            raise IndexError(f"block {number}")
        stream.append(copy := Copy(self, stream, number))
        return copy

    def run(self, stream: deque[Copy]) -> None:
        """End the first copy of a stream."""
        if stream:
            self.ended.append(stream.popleft().number)


def results(transfers: DeviceTransfers) -> list[tuple[int, bool, int]]:
    return [(result.job_id, result.ok, result.num_bytes) for result in transfers.finished()]


def test_submitting_and_polling_never_wait() -> None:
    device = Device()
    transfers = DeviceTransfers(device)
    transfers.submit_store(1, plan(1))
    transfers.submit_load(2, plan(2))
    transfers.submit_load(3, plan(3))
    assert results(transfers) == [] == device.ended
    # A load does not wait for a store.
    device.run(device.loads)
    assert results(transfers) == [(2, True, 20)]
    device.run(device.stores)
    device.run(device.loads)
    assert results(transfers) == [(1, True, 10), (3, True, 30)]
    assert results(transfers) == []


def test_the_seconds_are_those_of_the_device() -> None:
    device = Device()
    transfers = DeviceTransfers(device)
    transfers.submit_store(1, plan(1))
    device.run(device.stores)
    assert [result.seconds for result in transfers.finished()] == [0.5]


def test_waiting_is_for_the_named_jobs_alone() -> None:
    device = Device()
    transfers = DeviceTransfers(device)
    for job in (1, 2, 3):
        transfers.submit_store(job, plan(job))
    transfers.submit_load(4, plan(4))
    transfers.wait([2, 99])
    assert device.waits == [2] and device.ended == [1, 2]
    assert sorted(results(transfers)) == [(1, True, 10), (2, True, 20)]
    transfers.wait([2])
    assert results(transfers) == []


@pytest.mark.parametrize("how", ["poll", "wait"])
def test_a_failed_copy_is_a_result_and_the_next_one_continues(how: str, caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    device.failing = {1}
    transfers = DeviceTransfers(device)
    transfers.submit_load(1, plan(1))
    transfers.submit_load(2, plan(2))
    device.run(device.loads)
    device.run(device.loads)
    if how == "wait":
        transfers.wait([1, 2])
    assert results(transfers) == [(1, False, 0), (2, True, 20)]
    assert "offload load 1 failed" in caplog.text and "copy 1" in caplog.text


def test_a_copy_that_cannot_be_submitted_fails_and_the_engine_continues(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    device.refused = {1}
    transfers = DeviceTransfers(device)
    transfers.submit_store(1, plan(1))
    transfers.wait([1])
    assert results(transfers) == [(1, False, 0)]
    assert "block 1" in caplog.text


def test_closing_waits_for_every_copy_and_later_ones_fail() -> None:
    device = Device()
    transfers = DeviceTransfers(device)
    transfers.submit_store(1, plan(1))
    transfers.submit_load(2, plan(2))
    transfers.close()
    assert sorted(device.ended) == [1, 2]
    transfers.submit_store(3, plan(3))
    transfers.wait([3])
    transfers.close()
    assert sorted(results(transfers)) == [(1, True, 10), (2, True, 20), (3, False, 0)]


@given(st.data())
def test_every_job_has_one_result_whatever_happens(data: st.DataObject) -> None:
    device = Device()
    transfers = DeviceTransfers(device)
    found: list[Any] = []
    submitted = 0
    for _ in range(data.draw(st.integers(0, 30))):
        step = data.draw(st.sampled_from(["store", "load", "run store", "run load", "poll", "wait", "fail", "refuse"]))
        if step in ("store", "load"):
            submitted += 1
            submit = transfers.submit_store if step == "store" else transfers.submit_load
            submit(submitted, plan(submitted))
        elif step == "poll":
            found += results(transfers)
        elif step == "wait":
            number = data.draw(st.integers(1, submitted + 1))
            transfers.wait([number])
            assert number not in [
                copy.number for copy in (*device.stores, *device.loads) if number not in device.failing
            ]
        elif step == "fail" and submitted:
            device.failing.add(data.draw(st.integers(1, submitted)))
        elif step == "refuse":
            device.refused.add(submitted + 1)
        else:
            device.run(device.stores if step == "run store" else device.loads)
    transfers.close()
    found += results(transfers)
    assert sorted(job for job, _, _ in found) == list(range(1, submitted + 1))
    assert all(num_bytes == (10 * job if ok else 0) for job, ok, num_bytes in found)
    # A copy that did not fail was never reported before its end.
    assert {job for job, ok, _ in found if ok} <= set(device.ended)
