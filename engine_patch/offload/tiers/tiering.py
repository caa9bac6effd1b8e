# SPDX-License-Identifier: Apache-2.0
"""What is where in both tiers, and what moves: GPU to CPU, CPU to disk and back, for any number of groups. Pure but for
the disk.

Way of a chunk: the engine stores it into a CPU slot; when it is there it is also written to disk, as far as the disk
keeps up. When a request asks for a chunk that only the disk holds, it is read into a slot first, and the request waits
for that.

Invariants: a chunk is announced as stored in a tier when it can be read there, and as removed before its room is given
to another. Nothing leaves a tier without that. What one waiting request needs is not evicted for another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier

# vLLM looks up a request that waits for the disk in each step with room for one more. After this many steps without,
# others may use its room.
PATIENCE_STEPS = 256


class LookupAnswer(Enum):
    """Whether a chunk can be loaded. SOON: it is being read; look it up again."""

    NO = 0
    SOON = 1
    YES = 2


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class TierChange(NamedTuple):
    """Chunks of one tier that can be read from now on, or no longer."""

    medium: Medium
    removed: bool
    keys: list[OffloadKey]


class DiskFinished(Protocol):
    """The disk tier's result of a job. kind: "write" or "read"."""

    @property
    def kind(self) -> str: ...
    @property
    def key(self) -> OffloadKey: ...
    @property
    def slot(self) -> int: ...
    @property
    def ok(self) -> bool: ...


class Disk(Protocol):
    """What is needed of a disk tier: disk/tier.py, or disk/reader.py, which is not writable."""

    @property
    def writable(self) -> bool: ...
    @property
    def pending(self) -> int: ...
    def open(self) -> list[OffloadKey]: ...
    def holds(self, key: OffloadKey) -> bool: ...
    def writing(self, key: OffloadKey) -> bool: ...
    def write(self, key: OffloadKey, slot: int) -> bool: ...
    def read(self, key: OffloadKey, slot: int) -> bool: ...
    def touch(self, keys: Iterable[OffloadKey]) -> None: ...
    def poll(self) -> Sequence[DiskFinished]: ...
    def take_changes(self) -> Sequence[tuple[bool, OffloadKey]]: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Counts:
    """Counts since the start, in chunks unless noted."""

    # Calls to store when no slot was free.
    stores_refused: int = 0
    # Only on disk, wanted, and not read, as no slot was free.
    promotions_refused: int = 0
    promoted: int = 0
    # Read from disk, and not what was written.
    promotions_failed: int = 0
    # Stored in CPU memory and not on disk, as the disk did not keep up or is off.
    writes_skipped: int = 0
    resets: int = 0


@dataclass(slots=True)
class PromotionRequest:
    """What one request needed in its last step. One for each request, kept by the caller."""

    step: int = -1
    needed: set[OffloadKey] = field(default_factory=set)
    # To be read from disk.
    missing: list[OffloadKey] = field(default_factory=list)
    waits: bool = False
    # No room for them: this request continues without.
    refused: set[OffloadKey] = field(default_factory=set)
    promoted: set[OffloadKey] = field(default_factory=set)
    # All that it ever had to wait for.
    awaited: set[OffloadKey] = field(default_factory=set)


class Tiering:
    """The tiers of one engine, in its scheduler's thread. announce: whether changes are taken; else none are kept."""

    def __init__(self, cpu: CpuTier, disk: Disk | None, announce: bool = True) -> None:
        self.counts = Counts()
        self._cpu = cpu
        self._disk = disk
        self._announce = announce
        self._step = 0
        self._changes: list[TierChange] = []
        self._waiting: dict[int, PromotionRequest] = {}
        # Being read from disk, by slot; being written to it.
        self._reads: dict[int, OffloadKey] = {}
        self._writes: dict[int, OffloadKey] = {}
        # Of before a reset: the disk's threads still use these slots.
        self._outdated: set[int] = set()
        # Chunks that were spoken of as coming and did not come.
        self._missed: list[OffloadKey] = []
        # Since a reset: the engine's workers may still write to slots that were freed.
        self._held = False
        if disk is not None:
            self._say(Medium.STORAGE, False, disk.open())

    # Questions

    def look_up(self, key: OffloadKey, wish: PromotionRequest, disk: bool = True) -> LookupAnswer:
        """Whether a chunk can be loaded into the GPU, for the request of this wish. disk: whether it may come from
        there."""
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
        """Slots of chunks that are ready, which stay until `end_load`."""
        self._waiting.pop(id(wish), None)
        found = list(keys)
        self._touch(found)
        self._cpu.pin(found)
        return [self._cpu.slot(key) for key in found]

    def end_load(self, keys: Collection[OffloadKey]) -> None:
        self._cpu.unpin(list(keys))

    def begin_store(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], list[int]] | None:
        """Those that are not there yet and a slot for each; None when there is no room for all of them."""
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
        """The engine has filled the slots of these, or could not."""
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
        """Its request has ended."""
        self._waiting.pop(id(wish), None)
        self._miss(wish.awaited)
        wish.awaited.clear()

    # Steps

    def end_step(self) -> None:
        """After all questions of a step: what the disk has done, and what it is to do."""
        self._collect()
        for name, wish in list(self._waiting.items()):
            current = wish.step == self._step
            if (current and not wish.waits) or self._step - wish.step > PATIENCE_STEPS:
                del self._waiting[name]
        protected = self._protected()
        for wish in [wish for wish in self._waiting.values() if wish.step == self._step]:
            self._promote(wish, protected)
        self._step += 1

    @property
    def busy(self) -> bool:
        """Whether there is work or a report although no request runs."""
        return bool(self._changes or self._reads or self._writes or (self._disk is not None and self._disk.pending))

    def take_changes(self) -> list[TierChange]:
        """What changed since the last call, in order."""
        self._collect()
        changes, self._changes = self._changes, []
        return changes

    def take_missed(self) -> list[OffloadKey]:
        """Chunks that a request waited for, or that the engine began to store, and that came to nothing: they are not in
        memory, and nobody waits for them."""
        missed, self._missed = self._missed, []
        waited = self._protected()
        absent = (key for key in dict.fromkeys(missed) if self._cpu.state(key) is ChunkState.ABSENT)
        return [key for key in absent if key not in waited]

    def reset(self, hold: bool = False) -> None:
        """Forget everything: the model's weights may be others from here on. Slots that the disk uses are free when it
        is done. hold: nothing is read from disk until `end_hold`, as workers may still write to slots that are free
        now."""
        self.counts.resets += 1
        self._held = hold
        # What it noted of chunks, the engine forgets at a reset.
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
        """All that the engine's workers had begun before the reset has ended."""
        self._held = False

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    # Inside

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
            # Last first, as the CPU tier does; what is used in memory is as young on disk.
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
                # Its queue is full: requested again in the next step.
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
