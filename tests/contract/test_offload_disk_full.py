# SPDX-License-Identifier: Apache-2.0
"""A disk that is really full, and a folder that really becomes unwritable: the kernel refuses, not a stand-in."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.health import State
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey
from tests.support.disk_child import RECORD_BYTES, STRIDE_BYTES, HandExecutor, Slots, identity, key, payload

RETRY_S = 10.0
ROOM_BYTES = 256 * 1024
RECORDS = 4 * ROOM_BYTES // STRIDE_BYTES
NAMES = [key(number) for number in range(RECORDS)]


class Desk:
    """A tier on real system calls, whose work is done by hand while its clock stands still."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.folder = folder / identity().folder_name()
        self.slots = Slots(1)
        self.hands = HandExecutor()
        self.tier = DiskTier(
            folder,
            identity(),
            RECORD_BYTES,
            RECORDS * STRIDE_BYTES,
            self.slots.view,
            retry_s=RETRY_S,
            clock=lambda: self.now,
            files=FileOps(),
            executor=lambda: self.hands,
        )
        self.found = self.tier.open()

    def write(self, name: OffloadKey) -> bool | None:
        self.slots.fill(0, payload(name))
        if not self.tier.write(name, 0):
            return None
        self.hands.run_all()
        (finished,) = self.tier.poll()
        return finished.ok

    def read(self, name: OffloadKey) -> bool:
        self.slots.fill(0, bytes(RECORD_BYTES))
        assert self.tier.read(name, 0)
        self.hands.run_all()
        (finished,) = self.tier.poll()
        return finished.ok and self.slots.bytes(0) == payload(name)

    def trial(self) -> None:
        self.tier.poll()
        self.hands.run_all()
        self.tier.poll()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    instance = Desk(tmp_path)
    yield instance
    instance.tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system, or skip the test if this process may not."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(
            f"no file system can be mounted here ({mounted.stderr.decode().strip()}); the file size limit is tested"
        )
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fills_and_goes_on(desk: Desk, give_room: Callable[[], object], caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Write until the tier is full, make room, and check that the tier continues."""
    caplog.set_level(logging.INFO)
    held = 0
    while desk.write(NAMES[held]):
        held += 1
    assert held > 1 and desk.tier.state is State.FULL
    (line,) = [record.getMessage() for record in caplog.records if "is full" in record.getMessage()]
    assert why in line and str(desk.folder) in line and f"tried again in {RETRY_S:g} s" in line
    # The held records can be read, and their space is used again.
    assert all(desk.read(name) for name in NAMES[:held])
    assert desk.write(NAMES[held]) and desk.read(NAMES[held]) and not desk.tier.holds(NAMES[0])
    give_room()
    desk.now += RETRY_S
    assert desk.write(NAMES[held + 1]) and desk.tier.state is State.ON
    assert any(record.getMessage().endswith("is on") for record in caplog.records)
    more = NAMES[held + 2 : held + 6]
    assert all(desk.write(name) for name in more) and all(desk.read(name) for name in more)
    assert desk.tier.records == held + 5 and desk.tier.counters.errors == 0


def test_a_full_disk_that_gets_room_again(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(ROOM_BYTES // 2))
    desk = Desk(small_disk)
    try:
        fills_and_goes_on(desk, ballast.unlink, caplog, "No space left on device")
    finally:
        desk.tier.close()
    again = Desk(small_disk)
    assert len(again.found) == desk.tier.records
    again.tier.close()


def test_a_limit_on_the_size_of_files_that_is_raised(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
        fills_and_goes_on(desk, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before), caplog, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_folder_that_becomes_unwritable_and_writable_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Exchange the tier's descriptors for read-only ones, so that the kernel itself refuses writes."""
    held = NAMES[:3]
    assert all(desk.write(name) for name in held)
    desk.tier.take_changes()
    kept: dict[int, int] = {}
    opened = {int(link.name): os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    for fd, path in opened.items():
        if path.startswith(str(desk.folder)) and Path(path).name in ("manifest", "records"):
            kept[fd] = os.dup(fd)
            only_read = os.open(path, os.O_RDONLY)
            os.dup2(only_read, fd)
            os.close(only_read)
    assert len(kept) == 2
    assert [desk.write(name) for name in NAMES[3:6]] == [False, False, False]
    assert desk.tier.state is State.OFF and not desk.tier.holds(held[0])
    assert [change.stored for change in desk.tier.take_changes()] == [False, False, False]
    line = caplog.records[-1].getMessage()
    assert "is off (3 errors in a row, the last: [Errno 9] Bad file descriptor)" in line
    assert str(desk.folder) in line and "withdrawn" in line
    # The first trial fails, and a later one succeeds.
    desk.now += RETRY_S
    desk.trial()
    assert desk.tier.state is State.OFF
    for fd, writable in kept.items():
        os.dup2(writable, fd)
        os.close(writable)
    desk.now += 2 * RETRY_S
    desk.trial()
    assert desk.tier.state is State.ON
    assert [change.stored for change in desk.tier.take_changes()] == [True, True, True]
    assert all(desk.read(name) for name in held) and desk.write(NAMES[3])


def test_a_folder_replaced_by_a_file_refuses_the_start_by_name(tmp_path: Path) -> None:
    (tmp_path / identity().folder_name()).write_text("")
    with pytest.raises(RuntimeError, match=r"cannot use this folder .*set disk_path") as error:
        Desk(tmp_path)
    assert str(tmp_path / identity().folder_name()) in str(error.value)
