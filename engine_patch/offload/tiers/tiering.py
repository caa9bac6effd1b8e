# SPDX-License-Identifier: Apache-2.0
"""The books of both tiers and the moves between them: GPU to CPU, CPU to disk and back, for any number of groups.

Pure except for the disk. The engine stores a chunk into a CPU slot; when it has arrived it is also written to disk, as
far as the disk keeps up. When a request needs a chunk that only the disk holds, the chunk is read into a slot first,
and the request waits for that.

Invariants: a chunk is announced as stored in a tier when it can be read there, and as removed before its room is given
to another chunk. No chunk leaves a tier without such an announcement. The chunks that one waiting request needs are not
evicted for another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier

# vLLM looks up a request that waits for the disk in each step that has room for one more. After this many steps without
# a look-up, others may use the request's room.
PATIENCE_STEPS = 256


class LookupAnswer(Enum):
    """The answer to whether a chunk can be loaded."""

    NO = 0
    # The chunk is being read; look it up again.
    SOON = 1
    YES = 2


class Medium(Enum):
    """The tier of a change."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class TierChange(NamedTuple):
    """Chunks of one tier that can be read from now on, or no longer."""

    medium: Medium
    removed: bool
    keys: list[OffloadKey]


class DiskFinished(Protocol):
    """The disk tier's result of a job."""

    @property
    def kind(self) -> str:
        """Either "write" or "read"."""
        ...

    @property
    def key(self) -> OffloadKey:
        """The chunk."""
        ...

    @property
    def slot(self) -> int:
        """The slot that may be used again."""
        ...

    @property
    def ok(self) -> bool:
        """Whether the chunk was written or read completely."""
        ...


class Disk(Protocol):
    """The part of a disk tier that `Tiering` uses: `disk/tier.py`, or `disk/reader.py`, which is not writable."""

    @property
    def writable(self) -> bool:
        """Whether this engine writes to the disk."""
        ...

    @property
    def pending(self) -> int:
        """Jobs that `poll` has not reported yet."""
        ...

    def open(self) -> list[OffloadKey]:
        """Return the keys that can be read now, oldest first."""
        ...

    def holds(self, key: OffloadKey) -> bool:
        """Return whether the key can be read now."""
        ...

    def writing(self, key: OffloadKey) -> bool:
        """Return whether the key is being written."""
        ...

    def write(self, key: OffloadKey, slot: int) -> bool:
        """Queue a write of the slot's bytes, and return whether it was queued."""
        ...

    def read(self, key: OffloadKey, slot: int) -> bool:
        """Queue a read into the slot's bytes, and return whether it was queued."""
        ...

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """Count a use of the keys."""
        ...

    def poll(self) -> Sequence[DiskFinished]:
        """Return the jobs that ended since the last call."""
        ...

    def take_changes(self) -> Sequence[tuple[bool, OffloadKey]]:
        """Return (whether it was stored, key) of each change since the last call, in order."""
        ...

    def clear(self) -> None:
        """Forget all keys."""
        ...

    def close(self) -> None:
        """End all jobs and release the folder."""
        ...


@dataclass(slots=True)
class Counts:
    """Counts since the start, in chunks unless noted."""

    # Calls to store for which no slot was free.
    stores_refused: int = 0
    # Chunks only on disk that a request needed and that were not read, because no slot was free.
    promotions_refused: int = 0
    promoted: int = 0
    # Chunks that could not be read from disk, or were not what had been written.
    promotions_failed: int = 0
    # Chunks stored in CPU memory and not on disk, because the disk did not keep up or is off.
    writes_skipped: int = 0
    resets: int = 0


@dataclass(slots=True)
class PromotionRequest:
    """The chunks that one request needed in its last step; the caller keeps one for each request."""

    # The step of the request's last look-up; -1: none that counts.
    step: int = -1
    # Chunks that the request looked up in that step and can load or wait for.
    needed: set[OffloadKey] = field(default_factory=set)
    # Chunks to be read from disk.
    missing: list[OffloadKey] = field(default_factory=list)
    # Whether the request needs a chunk that cannot be loaded yet.
    waits: bool = False
    # Chunks for which there was no room; the request continues without them.
    refused: set[OffloadKey] = field(default_factory=set)
    # Chunks that were read from disk for the request.
    promoted: set[OffloadKey] = field(default_factory=set)
    # All chunks that the request ever had to wait for.
    awaited: set[OffloadKey] = field(default_factory=set)


class Tiering:
    """The tiers of one engine, used in its scheduler's thread."""

    def __init__(self, cpu: CpuTier, disk: Disk | None, announce: bool = True) -> None:
        """Open the disk.

        Args:
            cpu: The CPU tier.
            disk: The disk tier, or None without one.
            announce: Whether the caller takes the changes; otherwise none are kept.
        """
        self.counts = Counts()
        self._cpu = cpu
        self._disk = disk
        self._announce = announce
        self._step = 0
        self._changes: list[TierChange] = []
        self._waiting: dict[int, PromotionRequest] = {}
        # Chunks that are being read from disk, and written to it, by slot.
        self._reads: dict[int, OffloadKey] = {}
        self._writes: dict[int, OffloadKey] = {}
        # Slots of jobs from before a reset, which the disk's threads still use.
        self._outdated: set[int] = set()
        # Chunks that were reported as pending or began to be stored, and did not arrive.
        self._missed: list[OffloadKey] = []
        # Whether the engine's workers may still write to slots that a reset freed.
        self._held = False
        if disk is not None:
            self._say(Medium.STORAGE, False, disk.open())

    # Look-ups

    def look_up(self, key: OffloadKey, wish: PromotionRequest, disk: bool = True) -> LookupAnswer:
        """Return whether a chunk can be loaded into the GPU.

        Args:
            key: The chunk.
            wish: The promotion request of the request that needs the chunk.
            disk: Whether the chunk may be read from disk.
        """
        if wish.step != self._step:
            wish.step, wish.waits = self._step, False
            wish.needed.clear()
            wish.missing.clear()
        state = self._cpu.state(key)
        if state is ChunkState.ABSENT:
            if self._disk is None or self._held or not disk or key in wish.refused or not self._disk.holds(key):
                return LookupAnswer.NO
            wish.missing.append(key)
        wish.needed.add(key)
        if state is ChunkState.READY:
            return LookupAnswer.YES
        wish.waits = True
        wish.awaited.add(key)
        self._waiting[id(wish)] = wish
        return LookupAnswer.SOON

    # Transfers of the engine

    def begin_load(self, keys: Collection[OffloadKey], wish: PromotionRequest) -> list[int]:
        """Return the slots of ready chunks, which keep them until `end_load`."""
        self._waiting.pop(id(wish), None)
        chunks = list(keys)
        self._touch(chunks)
        self._cpu.pin(chunks)
        return [self._cpu.slot(key) for key in chunks]

    def end_load(self, keys: Collection[OffloadKey]) -> None:
        """Let the chunks of a `begin_load` be evicted again."""
        self._cpu.unpin(list(keys))

    def begin_store(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], list[int]] | None:
        """Return the keys that are not in memory yet, and a slot for each; None if there is no room for all of them."""
        absent: list[OffloadKey] = []
        present: list[OffloadKey] = []
        for key in dict.fromkeys(keys):
            (absent if self._cpu.state(key) is ChunkState.ABSENT else present).append(key)
        self._touch(present)
        if not absent:
            return [], []
        slots = self._allocate(absent, self._protected(present))
        if slots is None:
            self.counts.stores_refused += 1
            return None
        return absent, slots

    def end_store(self, keys: Iterable[OffloadKey], success: bool) -> None:
        """Make the chunks of a `begin_store` loadable, or abandon them if the engine could not fill their slots."""
        keys = [key for key in keys if self._cpu.state(key) is ChunkState.WRITING]
        if success:
            self._arrived(keys)
            for key in keys:
                self._write_behind(key)
        else:
            for key in keys:
                self._cpu.abandon(key)
            self._miss(keys)

    def forget(self, wish: PromotionRequest) -> None:
        """End the waits of a request that has ended."""
        self._waiting.pop(id(wish), None)
        self._miss(wish.awaited)
        wish.awaited.clear()

    # Scheduler steps, and the results that a step collects

    def end_step(self) -> None:
        """Collect finished disk jobs and start new ones; called after all look-ups of a step."""
        self._collect()
        for wish_id, wish in list(self._waiting.items()):
            is_current = wish.step == self._step
            if (is_current and not wish.waits) or self._step - wish.step > PATIENCE_STEPS:
                del self._waiting[wish_id]
        protected = self._protected()
        for wish in [wish for wish in self._waiting.values() if wish.step == self._step]:
            self._promote(wish, protected)
        self._step += 1

    @property
    def busy(self) -> bool:
        """Whether there is work or a report although no request runs."""
        return bool(self._changes or self._reads or self._writes or (self._disk is not None and self._disk.pending))

    def take_changes(self) -> list[TierChange]:
        """Return the changes since the last call, in order."""
        self._collect()
        changes, self._changes = self._changes, []
        return changes

    def take_missed(self) -> list[OffloadKey]:
        """Return pending chunks that did not arrive: they are not in memory, and no request waits for them.

        A chunk was pending if a request waited for it or if the engine began to store it.
        """
        missed, self._missed = self._missed, []
        awaited = self._protected()
        absent = (key for key in dict.fromkeys(missed) if self._cpu.state(key) is ChunkState.ABSENT)
        return [key for key in absent if key not in awaited]

    def reset(self, hold: bool = False) -> None:
        """Forget everything, because the model's weights may differ from here on.

        Slots that the disk uses become free when it is done with them.

        Args:
            hold: Whether to read nothing from disk until `end_hold`, because workers may still write to slots that are
                now free.
        """
        self.counts.resets += 1
        self._held = hold
        # The engine drops its own notes about pending chunks at a reset.
        self._missed.clear()
        self._collect()
        self._outdated |= self._reads.keys() | self._writes.keys()
        self._reads.clear()
        self._writes.clear()
        self._say(Medium.CPU, True, self._cpu.clear(self._outdated))
        if self._disk is not None:
            self._disk.clear()
            self._collect()
        for wish in self._waiting.values():
            wish.step = -1
        self._waiting.clear()

    def end_hold(self) -> None:
        """Allow reads from disk again: everything that the engine's workers had begun before the reset has ended."""
        self._held = False

    def close(self) -> None:
        """Close the disk."""
        if self._disk is not None:
            self._disk.close()

    # Internals

    def _say(self, medium: Medium, removed: bool, keys: Sequence[OffloadKey]) -> None:
        if not keys or not self._announce:
            return
        last = self._changes[-1] if self._changes else None
        if last is not None and last.medium is medium and last.removed is removed:
            last.keys.extend(keys)
        else:
            self._changes.append(TierChange(medium, removed, list(keys)))

    def _miss(self, keys: Iterable[OffloadKey]) -> None:
        if self._announce:
            self._missed += keys

    def _touch(self, keys: Sequence[OffloadKey]) -> None:
        self._cpu.touch(keys)
        if self._disk is not None:
            # A use in memory also counts as a use on disk. The last key is touched first, as in the CPU tier, so that
            # the first key is the youngest.
            self._disk.touch(keys[::-1])

    def _arrived(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._cpu.ready(key)
        self._say(Medium.CPU, False, keys)

    def _protected(self, more: Iterable[OffloadKey] = ()) -> frozenset[OffloadKey]:
        return frozenset(more).union(*(wish.needed for wish in self._waiting.values()))

    def _allocate(self, keys: Sequence[OffloadKey], protected: frozenset[OffloadKey]) -> list[int] | None:
        allocation = self._cpu.allocate(keys, protected)
        if allocation is None:
            return None
        self._say(Medium.CPU, True, allocation.evicted)
        return allocation.slots

    def _write_behind(self, key: OffloadKey) -> None:
        if self._disk is None or not self._disk.writable or self._disk.holds(key) or self._disk.writing(key):
            return
        slot = self._cpu.slot(key)
        if self._disk.write(key, slot):
            self._cpu.pin([key])
            self._writes[slot] = key
        else:
            self.counts.writes_skipped += 1

    def _promote(self, wish: PromotionRequest, protected: frozenset[OffloadKey]) -> None:
        if self._disk is None or self._held:
            return
        for i, key in enumerate(wish.missing):
            if self._cpu.state(key) is not ChunkState.ABSENT or not self._disk.holds(key):
                continue
            slots = self._allocate([key], protected)
            if slots is None:
                refused = [key for key in wish.missing[i:] if self._cpu.state(key) is ChunkState.ABSENT]
                wish.refused.update(refused)
                self.counts.promotions_refused += len(refused)
                return
            if not self._disk.read(key, slots[0]):
                # The disk's queue is full; the chunk is requested again in the next step.
                self._cpu.abandon(key)
                return
            self._reads[slots[0]] = key
            wish.promoted.add(key)

    def _collect(self) -> None:
        if self._disk is None:
            return
        for finished in self._disk.poll():
            if finished.slot in self._outdated:
                self._outdated.discard(finished.slot)
                self._cpu.release(finished.slot)
            elif finished.kind == "write":
                self._cpu.unpin([self._writes.pop(finished.slot)])
            else:
                key = self._reads.pop(finished.slot)
                if finished.ok:
                    self.counts.promoted += 1
                    self._arrived([key])
                else:
                    self.counts.promotions_failed += 1
                    self._cpu.abandon(key)
        for stored, key in self._disk.take_changes():
            self._say(Medium.STORAGE, not stored, [key])
