# SPDX-License-Identifier: Apache-2.0
"""Random writes, reads, clears, restarts, kills and faults against a dict of what was written.

The tier's work is done by hand, in any order, so that every order in which threads may end is possible. Three laws hold
throughout: the reports add up to the chunks that the tier holds; each of those reads back with the bytes last written;
nothing else is ever loaded.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE
from kvrouter.engine_patch.offload.disk.health import MAX_RETRY_S, State
from kvrouter.engine_patch.offload.disk.tier import UNCLEARED, DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey
from tests.support.disk_child import FaultyFiles, HandExecutor, Killed, Slots, identity, key, payload, salt_of
from tests.support.examples import examples

RECORD_BYTES = 64
STRIDE_BYTES = 4_096
SLOTS = 6
MAX_QUEUED = 4
RETRY_S = 10.0
# A time after which every trial of a failed disk is due.
LONG_S = MAX_RETRY_S + 1
KEYS = [key(number, number % 2) for number in range(7)]

names = st.sampled_from(KEYS)
several_names = st.lists(names, max_size=4, unique=True)
budgets = st.integers(1, 5)


@dataclass
class Under:
    """A read or write under way."""

    kind: str
    key: OffloadKey
    data: bytes
    # The number of the write that is under way or whose data is read.
    seq: int
    # Whether there was a clear since.
    stale: bool = False


class DiskModel(RuleBasedStateMachine):
    """A disk that never fails, so that the model knows the tier's state exactly."""

    faults = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kv-disk-model-"))
        self.now = 0.0
        self.writes = 0
        # The chunks that the tier is known to hold: bytes and number of the last write, in order of use.
        self.held: dict[OffloadKey, tuple[bytes, int]] = {}
        # The keys that the tier has reported as stored and not as removed.
        self.told: set[OffloadKey] = set()
        # The data written since the last clear; a disk that fails may return any of it.
        self.written: dict[OffloadKey, set[bytes]] = {}
        self.files = FaultyFiles()
        # While the tier closes, queued work is not done.
        self.closing = False

    @initialize(records=budgets, several=several_names)
    def start(self, records: int, several: list[OffloadKey]) -> None:
        self.open(records)
        assert self.found == []
        self.fill(several)

    def open(self, records: int) -> None:
        self.records = records
        self.slots = Slots(SLOTS, RECORD_BYTES)
        self.free = list(range(SLOTS))
        self.under: dict[int, Under] = {}
        self.hands = HandExecutor(MAX_QUEUED)
        self.tier = DiskTier(
            self.folder,
            identity(RECORD_BYTES),
            RECORD_BYTES,
            records * STRIDE_BYTES,
            self.slots.view,
            retry_s=RETRY_S,
            clock=lambda: self.now,
            files=self.files,
            executor=lambda: self.hands,
        )
        self.found = self.tier.open()
        self.told = set(self.found)
        assert len(self.told) == len(self.found) <= records

    @precondition(lambda self: self.free)
    @rule(name=names)
    def write(self, name: OffloadKey) -> None:
        self.writes += 1
        slot = self.free[-1]
        data = payload(name, RECORD_BYTES, self.writes)
        self.slots.fill(slot, data)
        on_its_way = any(job.key == name and job.kind == WRITE and not job.stale for job in self.under.values())
        expected = self.outcome_of_write(name, on_its_way)
        present = self.tier.holds(name)
        queued = self.tier.write(name, slot)
        assert on_its_way == self.tier.writing(name) or queued
        assert not (queued and (on_its_way or present))
        if queued:
            self.free.pop()
            self.under[slot] = Under(WRITE, name, data, self.writes)
            self.written.setdefault(name, set()).add(data)
        evicted = self.hear()
        if not self.faults:
            assert (queued, evicted) == expected
        for gone in evicted:
            del self.held[gone]

    def outcome_of_write(self, name: OffloadKey, on_its_way: bool) -> tuple[bool, list[OffloadKey]]:
        """Return, for a disk that works, whether a write is begun and which keys are evicted for it."""
        if name in self.held or on_its_way or not self.hands.has_room(False):
            return False, []
        reads = [job for job in self.under.values() if job.kind == READ]
        writes = sum(job.kind == WRITE for job in self.under.values())
        # Records that a clear left because they are still read; several reads may share one.
        left = len({job.seq for job in reads if job.stale})
        if len(self.held) + writes + left < self.records:
            return True, []
        read = {job.key for job in reads if not job.stale}
        victims = [held for held in self.held if held not in read]
        return bool(victims), victims[:1]

    @rule(several=several_names)
    def fill(self, several: list[OffloadKey]) -> None:
        """Write several chunks and finish the writes before anything else happens."""
        self.settle()
        for name in several:
            if self.free:
                self.write(name)
        self.settle()

    @precondition(lambda self: self.free and self.told)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.told)))
        slot = self.free[-1]
        self.slots.fill(slot, bytes(RECORD_BYTES))
        room = self.hands.has_room(True)
        assert self.tier.read(name, slot) == room
        if room:
            self.free.pop()
            self.under[slot] = Under(READ, name, *self.held[name])
            self.held[name] = self.held.pop(name)

    @precondition(lambda self: self.free)
    @rule(name=names)
    def read_what_is_not_there(self, name: OffloadKey) -> None:
        if name not in self.told:
            assert not self.tier.read(name, self.free[-1])

    @rule(name=names)
    def touch(self, name: OffloadKey) -> None:
        self.tier.touch([name])
        if name in self.held:
            self.held[name] = self.held.pop(name)

    @precondition(lambda self: self.hands.queued)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self.hands.run(data.draw(st.integers(0, len(self.hands.queued) - 1)))

    @rule()
    def settle(self) -> None:
        """Do all the queued work and report it."""
        self.hands.run_all()
        self.poll()

    @rule()
    def poll(self) -> None:
        for finished in self.tier.poll():
            job = self.under.pop(finished.slot)
            assert (finished.kind, finished.key) == (job.kind, job.key)
            self.free.append(finished.slot)
            self.ended(finished.slot, finished.ok, job)
        self.hear()

    def ended(self, slot: int, ok: bool, job: Under) -> None:
        """Compare the bytes of a finished job with the model, and update the model."""
        if job.stale:
            assert not ok
        elif not ok:
            assert self.faults or self.closing
        if job.kind == WRITE:
            assert self.slots.bytes(slot) == job.data
            if ok:
                self.held[job.key] = job.data, job.seq
        elif ok:
            assert self.slots.bytes(slot) == job.data
        elif not job.stale and self.held.get(job.key, (b"", -1))[1] == job.seq:
            del self.held[job.key]

    def hear(self) -> list[OffloadKey]:
        """Apply the reported changes, which come and go one at a time; return the removed keys."""
        gone = []
        for stored, name in self.tier.take_changes():
            assert stored is (name not in self.told)
            if stored:
                self.told.add(name)
            else:
                self.told.remove(name)
                gone.append(name)
        return gone

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.held.clear()
        for job in self.under.values():
            job.stale = True
        self.written.clear()
        self.hear()
        assert not self.told

    @rule(records=budgets)
    def restart(self, records: int) -> None:
        # The disk works from now on, so that a clear that failed is repeated.
        self.files.next.clear()
        self.files.always.clear()
        self.tier.close()
        self.closing = True
        self.poll()
        self.closing = False
        assert not self.under and self.tier.pending == 0
        left = sorted(self.held, key=lambda name: self.held[name][1])
        self.open(records)
        if not self.faults:
            # Keys that were evicted for a write that was not begun come back; of the other keys all do, or the newest.
            kept = [name for name in self.found if name in left]
            assert kept == left[len(left) - len(kept) :] and (len(self.found) == records or kept == left)
        self.relearn()

    @rule(records=budgets, writes=st.integers(0, 4), data=st.data())
    def kill(self, records: int, writes: int, data: st.DataObject) -> None:
        """Kill the tier within one piece of work or between two; queued work is lost."""
        if self.tier.reason.startswith(UNCLEARED):
            return
        self.files.writes_left = writes
        try:
            while self.hands.queued:
                self.hands.run(data.draw(st.integers(0, len(self.hands.queued) - 1)))
        except Killed:
            pass
        self.files.writes_left = None
        self.files.close_all()
        self.tier._folder.release()
        told_before = self.told
        self.open(records)
        # The reported keys are there, together with keys that came back or were written unreported, as far as the
        # budget allows.
        assert self.faults or told_before <= self.told or len(self.told) == records
        self.relearn()

    def relearn(self) -> None:
        """Read every key that the tier found.

        The data must be what was written last or, for a key that came back, something that was written.
        """
        for name in self.found:
            assert self.tier.read(name, 0)
            self.hands.run_all()
            (finished,) = self.tier.poll()
            if not self.faults:
                assert finished.ok
            if finished.ok:
                data = self.slots.bytes(0)
                assert data in self.written.get(name, ())
                last_write = self.held.get(name)
                if last_write is not None and not self.faults:
                    assert data == last_write[0]
                self.held[name] = data, salt_of(data)
        self.hear()
        self.held = {name: self.held[name] for name in self.found if name in self.told}

    @invariant()
    def told_is_held(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.told == {name for name in KEYS if self.tier.holds(name)}
        assert self.tier.pending == len(self.under)
        assert len(self.told) <= self.records
        assert self.told <= set(self.held)
        if self.tier.state in (State.ON, State.FULL):
            assert self.told == set(self.held)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
        shutil.rmtree(self.folder)


class FailingDiskModel(DiskModel):
    """A disk that fails in all ways: loaded data is still right, and reports still add up."""

    faults = True

    @rule(
        operation=st.sampled_from(
            [("write", "records"), ("write", "manifest"), ("read", "records"), ("read", "manifest")]
        ),
        fault=st.sampled_from([errno.EIO, errno.ENOSPC, "short", "none"]),
        before=st.integers(0, 2),
    )
    def fail(self, operation: tuple[str, str], fault: int | str, before: int) -> None:
        self.files.fail(*operation, *([None] * before), fault)

    @rule(
        operation=st.sampled_from(
            [("write", "records"), ("write", "manifest"), ("read", "records"), ("sync", "manifest")]
        )
    )
    def break_down(self, operation: tuple[str, str]) -> None:
        self.files.always[operation] = errno.EIO

    @rule()
    def turn_off(self) -> None:
        self.files.always["write", "records"] = errno.EIO
        for name in [*KEYS, *KEYS]:
            if self.free and self.tier.state is not State.OFF:
                self.write(name)
                self.settle()

    @rule()
    def repair(self) -> None:
        """Repair the disk, and wait long enough for the tier to notice."""
        self.files.next.clear()
        self.files.always.clear()
        # Earlier failures are processed before the time passes.
        self.settle()
        self.now += LONG_S
        self.settle()
        self.settle()
        assert self.tier.state is not State.OFF

    @rule(file=st.sampled_from(["records", "manifest"]), at=st.integers(0, 10**6))
    def flip(self, file: str, at: int) -> None:
        (path,) = self.folder.glob(f"*/{file}")
        content = bytearray(path.read_bytes())
        if content:
            content[at % len(content)] ^= 1 << at % 8
            path.write_bytes(content)

    @rule(seconds=st.sampled_from([1.0, 100.0, LONG_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def open(self, records: int) -> None:
        # A start on a failing disk is refused, which is tested elsewhere.
        self.files.next.clear()
        self.files.always.clear()
        super().open(records)


run = settings(max_examples=examples(100), stateful_step_count=40)
TestDisk = DiskModel.TestCase
TestDisk.settings = run
TestFailingDisk = FailingDiskModel.TestCase
TestFailingDisk.settings = run
