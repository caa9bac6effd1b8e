# SPDX-License-Identifier: Apache-2.0
"""Helpers that the tests of the disk tier share, and a program that writes to a tier until it is killed.

    python disk_child.py FOLDER SEED

The program opens a tier on FOLDER, writes, reads and sometimes clears it, and prints one line for each report as soon
as it arrives. KEY is in hexadecimal:

    + KEY          the key was stored
    - KEY          the key was removed
    ? KEY          a write of this key comes next, and may evict other keys
    clear          a clear comes next
    cleared SALT   the clear is done; payloads have this salt from here on

Each clear increases the salt of the payloads, and a process with a larger SEED has larger salts. The program ends on
SIGTERM.
"""

from __future__ import annotations

import errno
import hashlib
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity, GroupIdentity
from kvrouter.engine_patch.offload.disk.format.io_threads import Work
from kvrouter.engine_patch.offload.disk.format.manifest import ENTRY_BYTES
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey, pack

RECORD_BYTES = 5_000
STRIDE_BYTES = 8_192
SALT_BYTES = 8

# Sizes of the child process: large enough that a kill arrives during a write.
CHILD_RECORD_BYTES = 256 * 1_024
CHILD_RECORDS = 40
CHILD_KEYS = 90
CHILD_SLOTS = 24
CHILD_THREADS = 3
CLEAR_EVERY = 200
SLOW_PAYLOAD_BYTES = 64 * 1_024
SLOW_ENTRY_BYTES = 70
SLOW_S = 0.0005
SALTS_A_LIFE = 1_000_000


def identity(record_bytes: int = RECORD_BYTES, model: str = "m", **changed: object) -> DiskIdentity:
    groups = (GroupIdentity("full_attention", (512, 512), 16), GroupIdentity("sliding_window 128", (512,), 16))
    return DiskIdentity(model, "bfloat16", groups, 4, "sha256", record_bytes, **changed)  # type: ignore[arg-type]


def key(number: int, group: int = 0) -> OffloadKey:
    return pack(hashlib.sha256(str(number).encode()).digest(), group)


def payload(name: bytes, size: int = RECORD_BYTES, salt: int = 0) -> bytes:
    """Return bytes that no other key or salt has; the first 8 of them are the salt."""
    head = salt.to_bytes(SALT_BYTES, "big")
    return head + hashlib.shake_128(name + head).digest(size - SALT_BYTES)


def salt_of(data: bytes | memoryview) -> int:
    return int.from_bytes(data[:SALT_BYTES], "big")


class Slots:
    """CPU memory divided into slots of equal size."""

    def __init__(self, count: int, slot_bytes: int = RECORD_BYTES) -> None:
        self.memory = [bytearray(slot_bytes) for _ in range(count)]

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory[slot])

    def fill(self, slot: int, data: bytes) -> None:
        self.memory[slot][:] = data

    def bytes(self, slot: int) -> bytes:
        return bytes(self.memory[slot])


class HandExecutor:
    """An executor that queues work and runs it in the caller's thread when the test calls `run` or `run_all`."""

    def __init__(self, max_queued: int = 100) -> None:
        self.max_queued = max_queued
        self.queued: list[tuple[Work, bool]] = []
        self.closed = False

    def has_room(self, urgent: bool) -> bool:
        return not self.closed and sum(1 for _, kind in self.queued if kind is urgent) < self.max_queued

    def submit(self, work: Work, urgent: bool) -> bool:
        if not self.has_room(urgent):
            return False
        self.queued.append((work, urgent))
        return True

    def run(self, at: int = 0) -> None:
        self.queued.pop(at)[0]()

    def run_all(self) -> None:
        while self.queued:
            self.run()

    def close(self) -> None:
        self.closed = True
        self.queued.clear()


class Killed(BaseException):
    """A simulated kill of the process: from here on, nothing is written to the files."""


class FaultyFiles(FileOps):
    """The real system calls, some of which fail as the test sets it.

    Operations are named `(kind, file)`, where the kind is "read", "write" or "sync".
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        # Faults of the next calls of an operation: an errno to raise, "short" to move half of the bytes, "none" to
        # move no bytes without an error, or None for a call without a fault.
        self.next: dict[tuple[str, str], deque[int | str | None]] = {}
        # The errno that every call of an operation raises once `next` has no fault for it.
        self.always: dict[tuple[str, str], int] = {}
        # Writes until `Killed` is raised in the middle of one; None for no kill.
        self.writes_left: int | None = None
        self.syncs = 0

    def fail(self, operation: str, file: str, *faults: int | str | None) -> None:
        self.next.setdefault((operation, file), deque()).extend(faults)

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self.names[fd] = path.name
        return fd

    def close(self, fd: int) -> None:
        self.names.pop(fd)
        super().close(fd)

    def close_all(self) -> None:
        for fd in list(self.names):
            self.close(fd)

    def sync(self, fd: int) -> None:
        self.syncs += 1
        # A real sync is not needed, as no test cuts the power.
        self._limit("sync", fd, 0)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return super().pread(fd, into[: self._limit("read", fd, len(into))], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                super().pwrite(fd, data[: len(data) // 2], offset)
                raise Killed
        limit = self._limit("write", fd, len(data))
        return super().pwrite(fd, data[:limit], offset) if limit else 0

    def _limit(self, operation: str, fd: int, size: int) -> int:
        """Return how many bytes the call may move, or raise the OSError that the test set for it."""
        name = (operation, self.names[fd])
        faults = self.next.get(name)
        fault = faults.popleft() if faults else self.always.get(name)
        if isinstance(fault, int):
            raise OSError(fault, errno.errorcode[fault])
        return {"short": -(-size // 2), "none": 0}.get(fault or "", size)


class SlowFiles(FileOps):
    """A slow disk that writes few bytes in each call and then sleeps.

    A kill therefore nearly always interrupts a record, and often an entry of the manifest.
    """

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        count = super().pwrite(fd, data[: SLOW_ENTRY_BYTES if len(data) <= ENTRY_BYTES else SLOW_PAYLOAD_BYTES], offset)
        time.sleep(SLOW_S)
        return count


def main(folder: Path, seed: int, say: Callable[[str], object]) -> None:
    rng = random.Random(seed)
    slots = Slots(CHILD_SLOTS, CHILD_RECORD_BYTES)
    budget = CHILD_RECORDS * CHILD_RECORD_BYTES
    tier = DiskTier(
        folder, identity(CHILD_RECORD_BYTES), CHILD_RECORD_BYTES, budget, slots.view, CHILD_THREADS, files=SlowFiles()
    )
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    for stored_key in tier.open():
        say(f"+ {stored_key.hex()}")
    say("open")
    free = list(range(CHILD_SLOTS))
    salt = seed * SALTS_A_LIFE
    # Writes begun so far, and the number of writes at which the next clear comes.
    written, clear_at = 0, rng.randrange(2 * CLEAR_EVERY)

    def tell() -> None:
        for stored, changed in tier.take_changes():
            say(f"{'+' if stored else '-'} {changed.hex()}")

    while not stopped:
        for finished in tier.poll():
            data = slots.bytes(finished.slot)
            if finished.ok and data != payload(finished.key, CHILD_RECORD_BYTES, salt_of(data)):
                say(f"wrong {finished.key.hex()}")
            free.append(finished.slot)
        tell()
        if written >= clear_at:
            clear_at = written + rng.randrange(2 * CLEAR_EVERY)
            say("clear")
            tier.clear()
            tier.take_changes()
            salt += 1
            say(f"cleared {salt}")
        while free:
            name, slot = key(rng.randrange(CHILD_KEYS)), free[-1]
            if tier.holds(name):
                slots.fill(slot, bytes(CHILD_RECORD_BYTES))
                queued = tier.read(name, slot)
            else:
                slots.fill(slot, payload(name, CHILD_RECORD_BYTES, salt))
                say(f"? {name.hex()}")
                queued = tier.write(name, slot)
                written += queued
                tell()
            if not queued:
                break
            free.pop()
        time.sleep(SLOW_S)
    tier.close()
    tier.poll()
    tell()
    say("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), lambda line: print(line, flush=True))
