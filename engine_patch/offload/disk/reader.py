# SPDX-License-Identifier: Apache-2.0
"""The disk tier of an engine that reads records of another engine: the same folder, and REMOTE in its events.

Announced keys were in the manifest at the last look. A key is announced as removed by the look that no longer finds it,
or by the read that failed. The writer gives records to other keys without notice; a read compares entry and checksum,
so that no other content is ever loaded, and a lost record is a miss. Looks are made while the engine steps, one each
LOOK_S.

After a reset the model's weights may differ, and the two engines are not reset at the same moment. The folder's content
is used only while both engines were reset equally often since the reader opened it, and is withdrawn otherwise.

All methods run in the caller's thread. The bytes of a slot must stay untouched from `read` until `poll` has reported
the end of the read, also after `clear`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kvrouter.engine_patch.offload.disk.disk_events import READ, Counters, Finished, KeyChange
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity
from kvrouter.engine_patch.offload.disk.format.io_threads import Executor, IoThreads
from kvrouter.engine_patch.offload.disk.format.manifest import Entry
from kvrouter.engine_patch.offload.disk.format.record_store import RecordOutcome, Result
from kvrouter.engine_patch.offload.disk.health import RETRY_S, Health, State
from kvrouter.engine_patch.offload.disk.incident_log import DROPPED, IncidentLog
from kvrouter.engine_patch.offload.disk.job_queue import JobQueue
from kvrouter.engine_patch.offload.disk.view import ManifestLook, View
from kvrouter.engine_patch.offload.key import OffloadKey

# Seconds between looks: half of the time that a person calls immediate. A look at 100,000 records that did not change
# takes some 5 ms.
LOOK_S = 0.25
# Looks at a very large manifest must not keep a core busy, so they take at most a twentieth of the time.
LOOK_SHARE = 20
RESETS_DIFFER = (
    "this engine and the one that writes the folder were not reset equally often: reset the other one too, "
    "or start this one again if the model's weights are the same"
)

NO_HEADER = "the header of its manifest is missing or damaged"


class _Job(NamedTuple):
    key: OffloadKey
    slot: int
    entry: Entry
    life: int


class DiskReader:
    """A disk tier that never writes.

    More than 15 attributes: jobs, looks and the state of the folder change together in one turn of `poll`.
    """

    writable = False
    # The folder belongs to another engine, so its events say REMOTE.
    shared = True

    def __init__(
        self,
        folder: Path,
        identity: DiskIdentity,
        slot_bytes_of: Callable[[int], memoryview],
        threads: int,
        max_queued: int,
        *,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        files: FileOps | None = None,
        executor: Callable[[], Executor] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """Prepare to open the folder; the parameters are those of `tier.DiskTier`.

        Raises ValueError for a checksum that is not available.
        """
        self.counters = Counters()
        self.record_bytes = identity.record_bytes
        self._slot_bytes_of = slot_bytes_of
        self._view = View(folder, identity, files or FileOps())
        self._jobs: JobQueue[_Job, Result] = JobQueue(
            executor or functools.partial(IoThreads, threads, max_queued, "kv-disk")
        )
        self._log = log or logging.getLogger("vllm.kvrouter.offload")
        self._where = str(folder / identity.folder_name())
        self._health = Health(self._where, self._log, clock, retry_s)
        self._incidents = IncidentLog(self._where, self._log, clock)
        self._clock = clock
        # The entry of each record, of any generation; and the entry of each key in the current generation, the newest
        # if there are two.
        self._entries: dict[int, Entry] = {}
        self._held: dict[OffloadKey, Entry] = {}
        # The generation in the last valid header.
        self._generation: int | None = None
        # Resets of this engine minus those of the writer, which a new generation reveals.
        self._ahead = 0
        # The reason why the folder cannot be used: as found by the last look, and as last logged.
        self._problem = ""
        self._doubt = ""
        # Whether the keys in `_held` are announced.
        self._visible = False
        self._changes: list[KeyChange] = []
        # Grows with each reset; the results of reads from before a reset are void.
        self._life = 0
        # (seconds that the look took, look) of each look whose result was not taken yet.
        self._looks: deque[tuple[float, ManifestLook]] = deque()
        self._looking = False
        self._look_at_s = 0.0
        self._finished: list[Finished] = []

    def open(self) -> list[OffloadKey]:
        """Return the keys that can be read now, oldest first; `take_changes` does not return them again.

        If the folder does not exist yet, later looks try to find it. May be called once.
        """
        if self._health.state is not State.NEW:
            raise ValueError(f"the disk tier was opened before and is {self._health.state}: make another one")
        self._jobs.open()
        self._health.become(State.ON)
        self._look()
        self._take_looks()
        return [change.key for change in self.take_changes()]

    @property
    def state(self) -> State:
        """The state of the disk."""
        return self._health.state

    @property
    def off(self) -> bool:
        """Whether the folder is not used, for whatever reason."""
        return not self._visible

    @property
    def pending(self) -> int:
        """Reads that `poll` has not reported yet, plus a look under way; an engine may rest when the sum is 0."""
        return len(self._jobs) + len(self._finished) + self._looking

    @property
    def records(self) -> int:
        """Number of announced keys."""
        return len(self._held) if self._visible else 0

    def holds(self, key: OffloadKey) -> bool:
        """Return whether the key can be read now, which is exactly while it is announced."""
        return self._visible and key in self._held

    def writing(self, key: OffloadKey) -> bool:
        """Return False, because a reader never writes."""
        return False

    def write(self, key: OffloadKey, slot: int) -> bool:
        """Return False, because a reader never writes."""
        return False

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Do nothing, because the order of use is the writer's."""

    def read(self, key: OffloadKey, slot: int) -> bool:
        """Queue a read into the slot's bytes, and return whether it was queued.

        The read is queued if the key can be read and the queue has room.
        """
        if not self.holds(key) or not self._jobs.has_room(True):
            return False
        entry = self._held[key]
        into = self._slot_bytes_of(slot).cast("B")[: self.record_bytes]
        work = functools.partial(self._view.read, entry, into)
        self._jobs.submit(_Job(key, slot, entry, self._life), work, True)
        return True

    def poll(self) -> list[Finished]:
        """Return the jobs that ended since the last call, and start the next look when it is due."""
        for job, result in self._jobs.ended():
            self._have_read(job, result)
        self._take_looks()
        self._incidents.tick()
        open_now = self.state in (State.ON, State.OFF)
        if open_now and not self._looking and self._clock() >= self._look_at_s and self._jobs.has_room(False):
            # Looks are not urgent: they come after the reads, for which requests wait.
            self._looking = self._jobs.executor.submit(self._look, False)
        finished, self._finished = self._finished, []
        return finished

    def take_changes(self) -> list[KeyChange]:
        """Return the keys stored and removed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def clear(self) -> None:
        """Note a reset of this engine, and hide all keys while the writing engine was not reset equally often."""
        self._hide()
        self._ahead += 1
        self._life += 1
        self._show()

    def close(self) -> None:
        """Wait for the present read of each thread; queued reads end as not ok, which `poll` reports."""
        if self.state in (State.ON, State.OFF):
            unstarted = self._jobs.close()
            for job in [*(job for job, _ in self._jobs.ended()), *unstarted]:
                self._finished.append(Finished(READ, job.key, job.slot, False))
            self._visible = False
        self._health.become(State.CLOSED)

    # Looks

    def _look(self) -> None:
        """Scan the folder for records of other engines, in an I/O thread or, at the start, in the caller's thread."""
        began_s = self._clock()
        look = self._view.look()
        self._looks.append((self._clock() - began_s, look))

    def _take_looks(self) -> None:
        while self._looks:
            took_s, look = self._looks.popleft()
            self._looking = False
            self._look_at_s = self._clock() + max(LOOK_S, LOOK_SHARE * took_s)
            if look.missing or look.problem is None:
                self._saw(look)
            else:
                self._failed(look.problem)

    def _saw(self, look: ManifestLook) -> None:
        if self.state is State.OFF and self._health.trial_due():
            self._health.trial_ended(None)
        if look.fresh or look.missing:
            self._hide()
            self._generation = None
            self._entries.clear()
            self._held.clear()
        if look.generation is not None and look.generation != self._generation:
            self._begin_generation(look.generation)
        # Removals before additions: a key may have moved from one record to another.
        for index, _ in look.changed:
            self._drop(index)
        for index, entry in look.changed:
            if entry is not None:
                self._entries[index] = entry
                self._hold(entry)
        self._problem = look.problem or (NO_HEADER if look.generation is None else "")
        self._show()

    def _begin_generation(self, generation: int) -> None:
        self._hide()
        if self._generation is not None:
            self._ahead -= generation - self._generation
        self._generation = generation
        self._held.clear()
        for entry in self._entries.values():
            self._hold(entry)

    def _hold(self, entry: Entry) -> None:
        if entry.generation != self._generation:
            return
        former = self._held.get(entry.key)
        if former is None or former.seq < entry.seq:
            self._held[entry.key] = entry
            if former is None and self._visible:
                self._changes.append(KeyChange(True, entry.key))

    def _drop(self, index: int) -> None:
        entry = self._entries.pop(index, None)
        if entry is not None and self._held.get(entry.key) is entry:
            del self._held[entry.key]
            if self._visible:
                self._changes.append(KeyChange(False, entry.key))

    # Announcements

    def _hide(self) -> None:
        if self._visible:
            self._visible = False
            self._changes += [KeyChange(False, key) for key in self._held]

    def _show(self) -> None:
        """Announce the keys in `_held` if they may be read, and withdraw them if not."""
        problem = self._problem or (RESETS_DIFFER if self._ahead else "")
        if problem != self._doubt:
            self._doubt = problem
            if problem:
                self._log.warning("kvrouter: disk tier %s is not used: %s", self._where, problem)
        if problem or self.state is not State.ON:
            self._hide()
        elif not self._visible:
            self._visible = True
            oldest_first = sorted(self._held.values(), key=lambda entry: entry.seq)
            self._changes += [KeyChange(True, entry.key) for entry in oldest_first]

    # Reads

    def _have_read(self, job: _Job, result: Result) -> None:
        ok = job.life == self._life and result.outcome is RecordOutcome.DONE
        if result.outcome is RecordOutcome.DONE:
            self.counters.read_bytes += self.record_bytes
            self._health.read_well()
        else:
            # The record was given to another key or is damaged; the next look finds its present content.
            if self._held.get(job.key) is job.entry:
                self._drop(job.entry.record)
            if result.outcome is RecordOutcome.CORRUPT:
                self.counters.corrupt += 1
                self._incidents.found(result.reason, DROPPED)
            elif result.outcome is not RecordOutcome.REUSED:
                self._incidents.found(f"record {job.entry.record} could not be read ({result.reason})", DROPPED)
                self._failed(result.reason)
        self._finished.append(Finished(READ, job.key, job.slot, ok))

    def _failed(self, reason: str) -> None:
        self.counters.errors += 1
        if self.state is State.OFF:
            if self._health.trial_due():
                self._health.trial_ended(reason)
        elif self._health.failed(reason):
            # No request may rely on keys that cannot be read.
            self._hide()
