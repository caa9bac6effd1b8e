# SPDX-License-Identifier: Apache-2.0
"""The disk tier: chunks of slots in fixed-size records of one folder, within a byte budget, for one engine.

Announcements are exact: a key is announced as stored when its payload and its manifest entry are written, and as
removed before its record is given to another key, or when it can no longer be read. Every change is announced. Records
of an earlier process are found at the start.

Limits: one engine writes a folder, others may read it (`reader.py`); the order of use is kept in memory, so that after
a restart it is the order of writing; reads and writes go through the page cache. No error of the disk reaches the
caller: it becomes a removal, a count and, when it repeats, the state OFF.

All methods run in the caller's thread. The bytes of a slot must stay unchanged from `write`, and untouched from `read`,
until `poll` has reported the end of the job, also after `clear`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE, Counters, Finished, KeyChange
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.folder import Folder, claim, foreign, unusable
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity
from kvrouter.engine_patch.offload.disk.format.io_threads import Executor, IoThreads
from kvrouter.engine_patch.offload.disk.format.manifest import ForeignManifest
from kvrouter.engine_patch.offload.disk.format.record_store import Found, RecordOutcome, Result, Store
from kvrouter.engine_patch.offload.disk.format.records import stride_bytes
from kvrouter.engine_patch.offload.disk.health import RETRY_S, Health, Permit, State
from kvrouter.engine_patch.offload.disk.incident_log import DROPPED, NOT_WRITTEN, IncidentLog
from kvrouter.engine_patch.offload.disk.job_queue import JobQueue
from kvrouter.engine_patch.offload.disk.record_table import RecordTable, Room
from kvrouter.engine_patch.offload.key import OffloadKey

DEFAULT_THREADS = 2
# Each queued job holds a slot of CPU memory; 256 of 1 MiB are half a second of a disk that takes 500 MB/s.
DEFAULT_MAX_QUEUED = 256

# Until the folder is cleared, a restart may load content that is no longer valid, so later errors must not hide this
# reason.
UNCLEARED = "the folder could not be cleared, and a restart may find old content"

_OPEN = frozenset({State.ON, State.FULL, State.OFF})


class _Job(NamedTuple):
    kind: str
    key: OffloadKey
    slot: int
    record: int
    generation: int
    grows: bool


class _Chore(NamedTuple):
    """A job of the tier itself."""

    # True for a trial of a disk that is off, False for the sync after a clear.
    trial: bool
    generation: int


class DiskTier:
    """A disk tier that writes its folder.

    More than 15 attributes: jobs, records and the state of the disk change together in one turn of `poll`.
    """

    writable = True
    # The folder belongs to this engine, so its events say LOCAL.
    shared = False

    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        record_bytes: int,
        budget_bytes: int,
        slot_bytes_of: Callable[[int], memoryview],
        threads: int = DEFAULT_THREADS,
        max_queued: int = DEFAULT_MAX_QUEUED,
        *,
        retry_s: float = RETRY_S,
        option: str = "disk_path",
        clock: Callable[[], float] = time.monotonic,
        files: FileOps | None = None,
        executor: Callable[[], Executor] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """Check the budget; `open` opens the folder.

        Args:
            folder: The user's folder, which any number of identities share.
            identity: The identity of the records.
            record_bytes: Bytes of a record's payload.
            budget_bytes: Bytes that the records may take on disk.
            slot_bytes_of: Returns the bytes of a slot, at least record_bytes, without a copy.
            threads: The number of I/O threads.
            max_queued: Waiting reads, and separately waiting writes.
            retry_s: Seconds from a failure to the next trial.
            option: The user's name for the folder's setting, for the text of errors.
            clock: Returns monotonic seconds.
            files: The system calls; None: the real ones.
            executor: Makes a test's replacement of the threads; None: the threads.
            log: Receives messages; None: the logger of the offload tier.

        Raises:
            ValueError: The budget is less than one record, or record_bytes are not those of the identity.
        """
        if record_bytes != identity.record_bytes or record_bytes < 1:
            raise ValueError(f"records of {record_bytes} bytes, but the identity says {identity.record_bytes}")
        self._max_records = budget_bytes // stride_bytes(record_bytes)
        if self._max_records < 1:
            raise ValueError(
                f"{budget_bytes} bytes of disk hold no record of {stride_bytes(record_bytes)} bytes: "
                "set more bytes for the disk tier, or leave it out"
            )
        self.counters = Counters()
        self.record_bytes = record_bytes
        self._root = folder
        self._identity = identity
        self._slot_bytes_of = slot_bytes_of
        self._option = option
        self._files = files or FileOps()
        self._jobs: JobQueue[_Job | _Chore, Result] = JobQueue(
            executor or functools.partial(IoThreads, threads, max_queued, "kv-disk")
        )
        self._log = log or logging.getLogger("vllm.kvrouter.offload")
        where = str(folder / identity.folder_name())
        self._health = Health(where, self._log, clock, retry_s)
        self._incidents = IncidentLog(where, self._log, clock)
        self._table = RecordTable(self._max_records)
        self._next_seq = 0
        self._writing: set[OffloadKey] = set()
        self._changes: list[KeyChange] = []
        self._generation = 0
        self._finished: list[Finished] = []
        # The number of queued jobs that maintain the folder, and read or write no chunk.
        self._chores = 0
        self._on_trial = False
        # After a clear: whether its write is not on the medium yet, and whether it could not even be written.
        self._sync_wanted = False
        self._uncleared = False

    def open(self) -> list[OffloadKey]:
        """Claim the folder and return its keys, oldest first; they are not among the changes.

        May be called once.

        Raises:
            FolderInUse: Another engine writes to the folder.
            ForeignFolder: The folder holds records of another identity.
            DiskFolderError: The folder cannot be used. This and the two errors above say what to do.
            ValueError: The identity's checksum is not available, or the tier was opened before.
        """
        if self._health.state is not State.NEW:
            raise ValueError(f"the disk tier was opened before and is {self._health.state}: make another one")
        self._folder = claim(self._root, self._identity, self._option, self._log)
        try:
            self._store, recovered = self._recover(self._folder)
        except BaseException:
            self._folder.release()
            raise
        self._table.adopt(recovered.held, recovered.records)
        self._next_seq = recovered.next_seq
        self._generation = self._store.generation
        self.counters.corrupt += recovered.corrupt
        self._incidents.found_at_start(recovered.corrupt)
        self.counters.evicted += recovered.evicted
        self._jobs.open()
        self._health.become(State.ON)
        return [key for key, _ in recovered.held]

    @property
    def state(self) -> State:
        """Return whether the disk is new, on, full, off after errors, or closed."""
        return self._health.state

    @property
    def off(self) -> bool:
        """Whether the disk is not used, after errors."""
        return self.state is State.OFF

    @property
    def reason(self) -> str:
        """The reason why the state is not ON, for people."""
        return self._health.reason

    @property
    def pending(self) -> int:
        """Reads and writes that `poll` has not reported yet."""
        return len(self._jobs) - self._chores + len(self._finished)

    @property
    def records(self) -> int:
        """Number of keys on disk."""
        return len(self._table)

    def holds(self, key: OffloadKey) -> bool:
        """Return whether the key can be read now, which is exactly while it is announced."""
        return self._readable and self._table.get(key) is not None

    def writing(self, key: OffloadKey) -> bool:
        """Return whether a write of the key is queued or under way."""
        return key in self._writing

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Make the keys the newest, the last one most of all; ignore unknown keys."""
        for key in keys:
            self._table.touch(key)

    def write(self, key: OffloadKey, slot: int) -> bool:
        """Queue a write of the slot's bytes, and return whether it was queued.

        False changes nothing: the key is on disk (`holds`) or being written (`writing`), or no record or place in the
        queue is free.
        """
        if key in self._writing or self._table.get(key) is not None:
            return False
        data = self._bytes_of(slot)
        room = self._room()
        if room is None:
            return False
        if room.evicted is not None:
            self.counters.evicted += 1
            self._changes.append(KeyChange(False, room.evicted))
        self._writing.add(key)
        job = _Job(WRITE, key, slot, room.record, self._generation, room.grows)
        work = functools.partial(self._store.write, key, room.record, self._generation, self._next_seq, data)
        self._next_seq += 1
        self._jobs.submit(job, work, False)
        return True

    def read(self, key: OffloadKey, slot: int) -> bool:
        """Queue a read into the slot's bytes, and return whether it was queued.

        The read is queued if the key can be read and the queue has room.
        """
        index = self._table.get(key)
        if index is None or not self._readable or not self._jobs.has_room(True):
            return False
        into = self._bytes_of(slot)
        self._table.touch(key)
        self._table.pin(index)
        job = _Job(READ, key, slot, index, self._generation, False)
        self._jobs.submit(job, functools.partial(self._store.read, key, index, self._generation, into), True)
        return True

    def poll(self) -> list[Finished]:
        """Return the jobs that ended since the last call, in the order in which they ended."""
        self._process()
        if self.state in _OPEN:
            self._do_chores()
            self._incidents.tick()
        finished, self._finished = self._finished, []
        return finished

    def take_changes(self) -> list[KeyChange]:
        """Return the keys stored and removed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def clear(self) -> None:
        """Remove all keys, including jobs in progress: their reads and writes end as not ok.

        This makes one small write to the manifest. If it fails, the tier is off until a trial succeeds.
        """
        if self.state not in _OPEN:
            return
        keys = self._table.clear()
        if self._readable:
            self._changes += [KeyChange(False, key) for key in keys]
        self._writing.clear()
        self._generation += 1
        result = self._store.clear(self._generation)
        self._sync_wanted = True
        self._uncleared = result.outcome is not RecordOutcome.DONE
        if self._uncleared:
            self.counters.errors += 1
            self._health.turn_off(f"{UNCLEARED}: {result.reason}")

    def close(self) -> None:
        """Wait for the present read or write of each thread; queued jobs end as not ok, which `poll` reports.

        The records stay for the next process.
        """
        if self.state in _OPEN:
            unstarted = self._jobs.close()
            self._process()
            for job in unstarted:
                if isinstance(job, _Job):
                    self._finished.append(Finished(job.kind, job.key, job.slot, False))
            self._chores = 0
            if self._sync_wanted:
                # This is the last chance to put a clear on the medium; its result is no longer reported.
                self._store.trial(None)
            self._store.close()
            self._folder.release()
        self._health.become(State.CLOSED)

    @property
    def _readable(self) -> bool:
        return self.state in (State.ON, State.FULL)

    def _recover(self, folder: Folder) -> tuple[Store, Found]:
        store = None
        try:
            store = Store.open(folder.path, self._identity, self._files)
            return store, store.recover(self._max_records)
        except BaseException as error:
            if store is not None:
                store.close()
            if isinstance(error, ForeignManifest):
                raise foreign(folder.path, str(error), self._option) from error
            if isinstance(error, OSError):
                raise unusable(folder.path, error, self._option) from error
            raise

    def _bytes_of(self, slot: int) -> memoryview:
        data = self._slot_bytes_of(slot)
        if data.nbytes < self.record_bytes:
            raise ValueError(f"slot {slot} has {data.nbytes} bytes, a record {self.record_bytes}: make slots larger")
        return data.cast("B")[: self.record_bytes]

    def _room(self) -> Room | None:
        """Give out a record to write now, or return None if nothing may be written."""
        if not self._readable or not self._jobs.has_room(False):
            return None
        permit = self._health.permit()
        return None if permit is Permit.NONE else self._table.room(permit is Permit.GROW)

    def _do_chores(self) -> None:
        """Queue a trial of a disk that is off, or the sync after a clear, when it is due and the queue has room."""
        trial = self.state is State.OFF and not self._on_trial and self._health.trial_due()
        sync = self._readable and self._sync_wanted
        if not (trial or sync) or not self._jobs.has_room(True):
            return
        work: Callable[[], Result] = self._store.sync
        if trial:
            self._on_trial = True
            oldest = next(iter(self._table), None)
            work = functools.partial(self._store.trial, None if oldest is None else self._table.get(oldest))
        else:
            self._sync_wanted = False
        self._chores += 1
        self._jobs.submit(_Chore(trial, self._generation), work, True)

    def _process(self) -> None:
        for job, result in self._jobs.ended():
            if isinstance(job, _Chore):
                self._chores -= 1
                self._chore_ended(job, result)
                continue
            ok = self._wrote(job, result) if job.kind == WRITE else self._have_read(job, result)
            self._finished.append(Finished(job.kind, job.key, job.slot, ok))

    def _chore_ended(self, chore: _Chore, result: Result) -> None:
        if not chore.trial:
            if result.outcome is not RecordOutcome.DONE:
                self._failed(result)
            return
        self._on_trial = False
        # A clear that came meanwhile, and failed, needs another trial to succeed.
        if self.state is State.OFF and chore.generation == self._generation:
            if result.outcome is RecordOutcome.DONE:
                self._sync_wanted = self._uncleared = False
                self._health.trial_ended(None)
                self._changes += [KeyChange(True, key) for key in self._table]
            else:
                self.counters.errors += 1
                self._health.trial_ended(f"{UNCLEARED}: {result.reason}" if self._uncleared else result.reason)

    def _wrote(self, job: _Job, result: Result) -> bool:
        is_current = job.generation == self._generation
        if is_current:
            self._writing.discard(job.key)
        if result.outcome is RecordOutcome.DONE:
            self.counters.written_bytes += self.record_bytes
            self._health.wrote_well(job.grows)
            if is_current:
                self._table.hold(job.key, job.record)
                self._tell(True, job.key)
                return True
            self._table.give_back(job.record, False)
            return False
        self._table.give_back(job.record, job.grows)
        if result.outcome is RecordOutcome.NO_SPACE:
            self.counters.full += 1
            self._health.no_space(job.grows, result.reason)
        else:
            self._incidents.found(f"record {job.record} could not be written ({result.reason})", NOT_WRITTEN)
            self._failed(result)
        return False

    def _have_read(self, job: _Job, result: Result) -> bool:
        self._table.unpin(job.record)
        is_current = job.generation == self._generation
        if result.outcome is RecordOutcome.DONE:
            self.counters.read_bytes += self.record_bytes
            self._health.read_well()
            return is_current
        # Another read of the same record may have failed before and dropped the key.
        if is_current and self._table.get(job.key) == job.record:
            self._table.drop(job.key)
            self._tell(False, job.key)
        if result.outcome is RecordOutcome.CORRUPT:
            self.counters.corrupt += 1
            self._incidents.found(result.reason, DROPPED)
        else:
            self._incidents.found(f"record {job.record} could not be read ({result.reason})", DROPPED)
            self._failed(result)
        return False

    def _failed(self, result: Result) -> None:
        self.counters.errors += 1
        if self._health.failed(result.reason):
            # No request may rely on keys that cannot be read.
            self._changes += [KeyChange(False, key) for key in self._table]

    def _tell(self, stored: bool, key: OffloadKey) -> None:
        if self._readable:
            self._changes.append(KeyChange(stored, key))
