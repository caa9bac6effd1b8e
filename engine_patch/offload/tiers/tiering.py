# SPDX-License-Identifier: Apache-2.0
"""The books of the tiers and the moves between them: GPU to CPU, CPU to disk and back, for any number of groups.

Pure except for the disk and the peers. The engine stores a chunk into a CPU slot; when it has arrived it is also written
to disk, as far as the disk keeps up. When a request needs a chunk that only the disk holds, or the engine that the
request names as its source, the chunk is read into a slot first, and the request waits for that.

Invariants: a chunk is announced as stored in a tier when it can be read there, and as removed before its room is given
to another chunk. No chunk leaves a tier without such an announcement. Nothing is evicted that a waiting request may load in
the end, not even for chunks that the same request waits for: some of these may not come, and a part of the prompt that is
here already is what the request then falls back on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import NamedTuple, Protocol

from kvrouter.engine_patch.offload.key import GROUP_BYTES, OffloadKey, short_hash
from kvrouter.engine_patch.offload.peer.lender import LENT_TOO_MUCH, NO_SLOT, ON_DISK, OTHER_WEIGHTS
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier
from kvrouter.engine_patch.offload.tiers.guests import Guests
from kvrouter.engine_patch.offload.tiers.lineage import Lineage, Trail
from kvrouter.engine_patch.offload.tiers.peer_tier import PeerTier
from kvrouter.engine_patch.offload.tiers.peer_wish import PeerWish
from kvrouter.engine_patch.offload.tiers.warming import Batch, Warming
from kvrouter.events.peer.hand_over import WarmEnd

# vLLM looks up a request that waits for the disk in each step that has room for one more. After this many steps without
# a look-up, others may use the request's room.
PATIENCE_STEPS = 256
# Chunks that a hand-over looks at, or orders, while it holds the lock: less than a millisecond.
WARM_TURN_CHUNKS = 512
# Blocks for each slot whose predecessors are known at most: enough unless stores fail often.
LINEAGE_BLOCKS = 2


class LookupAnswer(Enum):
    """The answer to whether a chunk can be loaded."""

    NO = 0
    # The chunk is being read; look it up again.
    SOON = 1
    YES = 2
    # It is not known yet whether the chunk can be fetched; look it up again.
    UNKNOWN = 3


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
    # Chunks that hand-overs brought.
    handed_over: int = 0


@dataclass(slots=True)
class PromotionRequest:
    """The chunks that one request needed in its last step; the caller keeps one for each request."""

    # The step of the request's last look-up; -1: none that counts.
    step: int = -1
    # The chunks of all groups at each block at which the request found one that it can load or wait for. In the end it may
    # load others than it looked up last: while chunks behind are pending, vLLM does not look for the checkpoint or the
    # window at which the prompt ends without them.
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
    # The end of what the request has stored.
    trail: Trail = field(default_factory=Trail)
    # The chunks of the engine that the request names as its source; None if it names none.
    peer: PeerWish | None = None


class Tiering:
    """The tiers of one engine, used in its scheduler's thread.

    Another thread lends chunks to other engines by `readable`, `lend` and `take_back`, and a third receives the chunks of
    a hand-over by `warm` and its neighbours. All threads hold `lock` while they use the CPU tier; the scheduler's thread
    takes it in `manager.py`.
    """

    def __init__(
        self,
        cpu: CpuTier,
        disk: Disk | None,
        announce: bool = True,
        peers: PeerTier | None = None,
        guests: Guests | None = None,
    ) -> None:
        """Open the disk.

        Args:
            cpu: The CPU tier.
            disk: The disk tier, or None without one.
            announce: Whether the caller takes the changes; otherwise none are kept.
            peers: The peer tier, or None without one.
            guests: The chunks that are read from disk to be lent, or None if the disk is not lent.
        """
        self.counts = Counts()
        self.lock = threading.Lock()
        self.peers = peers
        self._cpu = cpu
        self._disk = disk
        self._guests = guests
        self._announce = announce
        self._step = 0
        # The last bytes of the keys of each group of which a chunk was ever in CPU memory.
        self._groups: set[bytes] = set()
        # Whether chunks were looked up that the engine may load before the step ends, so that no other thread evicts any.
        self._in_step = False
        self._changes: list[TierChange] = []
        self._waiting: dict[int, PromotionRequest] = {}
        # Chunks that are being read from disk, and written to it, by slot.
        self._reads: dict[int, OffloadKey] = {}
        self._writes: dict[int, OffloadKey] = {}
        # Chunks that are being fetched from other engines, by slot.
        self._pulls: dict[int, OffloadKey] = {}
        # Slots of jobs from before a reset, which the disk's threads still use.
        self._outdated: set[int] = set()
        # Chunks that were reported as pending or began to be stored, and did not arrive.
        self._missed: list[OffloadKey] = []
        # Whether the engine's workers may still write to slots that a reset freed.
        self._held = False
        # The known blocks before blocks; None without a peer tier, as only a hand-over needs them.
        self.lineage = None if peers is None else Lineage(LINEAGE_BLOCKS * cpu.num_slots)
        self._warming: Warming | None = None
        # Wakes an engine that is idle, so that it announces what a hand-over brought; by default it waits for a step.
        self.wake: Callable[[], None] = _do_nothing
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
        self._in_step = True
        if wish.step != self._step:
            wish.step, wish.waits = self._step, False
            wish.missing.clear()
        state = self._cpu.state(key)
        if state is ChunkState.ABSENT:
            if self._held or key in wish.refused:
                return LookupAnswer.NO
            if not (disk and self._on_disk(key)):
                is_held = self._at_peer(key, wish)
                if is_held is None:
                    wish.waits = True
                    self._waiting[id(wish)] = wish
                    return LookupAnswer.UNKNOWN
                if not is_held:
                    return LookupAnswer.NO
            wish.missing.append(key)
        elif state is ChunkState.WRITING and self.peers is not None and self.peers.is_overdue(key, wish.peer):
            return LookupAnswer.NO
        if key not in wish.needed:
            wish.needed.add(key)
            wish.needed.update(OffloadKey(key[:-GROUP_BYTES] + group) for group in self._groups)
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

    def begin_store(
        self, keys: Iterable[OffloadKey], wish: PromotionRequest | None = None
    ) -> tuple[list[OffloadKey], list[int]] | None:
        """Return the keys that are not in memory yet, and a slot for each; None if there is no room for all of them.

        Args:
            keys: The chunks, in the order of the prompt in each group.
            wish: The promotion request of the request that stores them, or None.
        """
        keys = list(keys)
        if self.lineage is not None and wish is not None:
            self.lineage.learn(keys, wish.trail)
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
        if self.peers is not None and wish.peer is not None:
            self.peers.forget(wish.peer)

    # Scheduler steps, and the results that a step collects

    def end_step(self) -> None:
        """Collect finished disk jobs and start new ones; called after all look-ups of a step."""
        self._collect()
        for wish_id, wish in list(self._waiting.items()):
            is_current = wish.step == self._step
            if (is_current and not wish.waits) or self._step - wish.step > PATIENCE_STEPS:
                del self._waiting[wish_id]
        current = [wish for wish in self._waiting.values() if wish.step == self._step]
        # A long prompt needs tens of thousands of chunks, which are collected only if one is to be read.
        protected = self._protected() if any(wish.missing for wish in current) else frozenset()
        for wish in current:
            self._promote(wish, protected)
            if self.peers is not None and wish.peer is not None:
                self.peers.query(wish.peer)
        self._step += 1
        self._in_step = False

    @property
    def busy(self) -> bool:
        """Whether there is work or a report although no request runs."""
        return bool(
            self._changes
            or self._reads
            or self._writes
            or (self._disk is not None and self._disk.pending)
            or (self.peers is not None and self.peers.busy)
        )

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
        awaited = frozenset[OffloadKey]().union(*(wish.awaited for wish in self._waiting.values()))
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
        self._outdated |= self._reads.keys() | self._writes.keys() | self._pulls.keys()
        self._reads.clear()
        self._writes.clear()
        self._pulls.clear()
        if self.peers is not None:
            self.peers.clear()
        if self.lineage is not None:
            self.lineage.clear()
        if self._guests is not None:
            self._guests.clear()
        if self._warming is not None:
            self._warming.reset()
        self._say(Medium.CPU, True, self._cpu.clear(self._outdated))
        if self._disk is not None:
            self._disk.clear()
            self._collect()
        for wish in self._waiting.values():
            wish.step = -1
            wish.needed.clear()
        self._waiting.clear()

    def end_hold(self) -> None:
        """Allow reads from disk again: everything that the engine's workers had begun before the reset has ended."""
        self._held = False

    def close(self) -> None:
        """Close the disk."""
        self.fail_warming()
        if self.peers is not None:
            self.peers.close()
        if self._disk is not None:
            self._disk.close()

    # Loans to other engines, for the thread that lends; each call takes the lock

    @property
    def num_resets(self) -> int:
        """The number of resets of the tiers."""
        return self.counts.resets

    @property
    def lends_disk(self) -> bool:
        """Whether chunks that only the disk holds are lent, too."""
        return self._guests is not None

    def readable(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each chunk whether it can be lent, and count that as a use of the chunk.

        The reader borrows some of them in its next step; the oldest would be evicted until then where memory is short.
        """
        with self.lock:
            lendable = list(map(self._is_lendable, keys))
            self._touch(list(compress(keys, lendable)))
            return lendable

    def by_worth(self) -> tuple[list[OffloadKey], dict[int, int]]:
        """Return all chunks that are ready in CPU memory, the most valuable first, and the known blocks before blocks."""
        with self.lock:
            return self._cpu.by_worth(), {} if self.lineage is None else self.lineage.copy()

    def lend(self, keys: Sequence[OffloadKey], num_resets: int, most: int, is_use: bool = True) -> list[int]:
        """Pin the first `most` chunks that can be lent, and return the slot of each, or ON_DISK for one that has none yet.

        The others have NO_SLOT if they cannot be lent, else LENT_TOO_MUCH. If the tiers were not reset exactly `num_resets`
        times, nothing is lent, and each is OTHER_WEIGHTS. `is_use` says whether the chunks count as used.
        """
        with self.lock:
            if num_resets != self.counts.resets:
                return [OTHER_WEIGHTS] * len(keys)
            lendable = list(filter(self._is_lendable, keys))
            chosen, refused = lendable[:most], set(lendable[most:])
            lent = [key for key in chosen if self._cpu.state(key) is ChunkState.READY]
            if is_use:
                self._touch(lent)
            self._cpu.pin(lent)
            slots = dict.fromkeys(chosen, ON_DISK) | {key: self._cpu.slot(key) for key in lent}
            return [slots.get(key, LENT_TOO_MUCH if key in refused else NO_SLOT) for key in keys]

    def read_to_lend(self, keys: Sequence[OffloadKey], num_resets: int) -> set[OffloadKey]:
        """Begin to read chunks that only the disk holds, as far as readers may use it; return those without a slot."""
        with self.lock:
            had_changes = bool(self._changes)
            # An engine that is idle collects nothing itself.
            self._collect()
            may_read = num_resets == self.counts.resets and not self._in_step and not self._held
            without_slot = self._read_guests(keys) if may_read else set()
            has_news = bool(self._changes) and not had_changes
        if has_news:
            self.wake()
        return without_slot

    def checksums(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return the checksums of those chunks that were lent before, and are the same since."""
        with self.lock:
            return {key: self._cpu.checksums[key] for key in keys if key in self._cpu.checksums}

    def keep_checksums(self, checksums: Mapping[OffloadKey, int], num_resets: int) -> None:
        """Remember the checksums of chunks that were lent when the tiers had been reset `num_resets` times."""
        with self.lock:
            if num_resets == self.counts.resets:
                self._cpu.checksums.update(checksums)

    def take_back(self, keys: Sequence[OffloadKey], num_resets: int) -> None:
        """Unpin chunks that were lent when the tiers had been reset `num_resets` times; a reset ends all pins."""
        with self.lock:
            if num_resets == self.counts.resets:
                self._cpu.unpin(keys)

    def _is_lendable(self, key: OffloadKey) -> bool:
        if self._cpu.state(key) is ChunkState.READY:
            return True
        return self._guests is not None and (self._on_disk(key) or self._guests.is_coming(key))

    def _read_guests(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        absent = (key for key in dict.fromkeys(keys) if self._cpu.state(key) is ChunkState.ABSENT)
        missing = list(filter(self._on_disk, absent))
        guests = self._guests
        if guests is None or not missing or not guests.may_read():
            return set()
        protected = self._protected()
        for i, key in enumerate(missing):
            if not guests.may_read():
                break
            left = guests.make_room(protected)
            self._evicted(left or [])
            slots = None if left is None else self._allocate([key], protected)
            if slots is None:
                return set(missing[i:])
            if not self._begin_read(key, slots[0]):
                break
            guests.admit(key)
        return set()

    # A hand-over from another engine, for the thread that receives it; each call takes the lock

    def warm(self, warming: Warming) -> None:
        """Begin a hand-over in place of the last one, which has ended."""
        with self.lock:
            self._warming = warming

    def advance_warming(self) -> bool:
        """Do a bounded share of the work of the hand-over, and return whether it goes on."""
        with self.lock:
            warming = self._warming
            if warming is None or self.peers is None:
                return False
            had_changes = bool(self._changes)
            self._collect_pulls()
            batch = warming.check_batch()
            if batch is not None:
                self._take_batch(batch)
            warming.check_time()
            if not warming.end and not warming.is_waiting and not self._in_step:
                self._warm_further(warming, self.peers)
            if warming.question is not None and (shared := self.peers.take_shared(warming.question)) is not None:
                warming.take_shared(shared)
            is_over = warming.end and warming.batch is None
            has_news = bool(self._changes) and not had_changes
        if has_news:
            self.wake()
        if is_over and not warming.is_ordered:
            self._order_warmed(warming)
        return not is_over

    def fail_warming(self) -> None:
        """End a hand-over after an error of its thread."""
        with self.lock:
            if self._warming is not None:
                self._warming.finish(WarmEnd.CLOSED)

    def stop_warming(self, number: int) -> None:
        """End the hand-over of that number; chunks under way still arrive."""
        with self.lock:
            if self._warming is not None and self._warming.number == number:
                self._warming.finish(WarmEnd.STOPPED)

    def _warm_further(self, warming: Warming, peers: PeerTier) -> None:
        """Begin the next batch, or request more chunks of the share."""
        if not warming.queue and warming.knows_all:
            warming.finish(WarmEnd.COMPLETE)
            return
        if not warming.queue:
            warming.question = peers.ask_share(
                warming.source, warming.share, warming.num_shares, warming.skip, warming.deadline_s()
            )
            return
        if self._held:
            return
        keys: list[OffloadKey] = []
        blocks_before: list[int] = []
        free = self._cpu.usage.free
        room = free + warming.evictions_left
        for _ in range(WARM_TURN_CHUNKS):
            if not warming.queue or len(keys) == min(warming.batch_chunks, warming.chunks_left, room):
                break
            key, before = warming.queue.popleft()
            if self._cpu.state(key) is not ChunkState.ABSENT or self._on_disk(key):
                warming.pass_over()
            else:
                keys.append(key)
                blocks_before.append(before)
        if not keys:
            if warming.chunks_left < 1 or room < 1:
                warming.finish(WarmEnd.BYTES if warming.chunks_left < 1 else WarmEnd.ROOM)
            return
        slots = self._allocate(keys, self._protected())
        if slots is None:
            warming.finish(WarmEnd.ROOM)
            return
        wish = PeerWish(warming.source, peers.timeout_s, warming.deadline_s(), is_hand_over=True)
        self._pulls.update(zip(slots, keys, strict=True))
        peers.pull(wish, keys, slots)
        warming.begin(Batch(wish, keys, blocks_before), max(0, len(keys) - free))

    def _take_batch(self, batch: Batch) -> None:
        """Count the chunks of a batch, and learn their places in prompts from the source."""
        self.counts.handed_over += len(batch.wish.pulled)
        for key, before in zip(batch.keys, batch.before, strict=True):
            if before and self.lineage is not None and key in batch.wish.pulled:
                self.lineage.adopt(short_hash(key), before)

    def _order_warmed(self, warming: Warming) -> None:
        """Make the chunks of a hand-over as young as their source valued them: the first that it offered the youngest."""
        warming.is_ordered = True
        keys = warming.fetched
        for end in range(len(keys), 0, -WARM_TURN_CHUNKS):
            with self.lock:
                self._cpu.touch(keys[max(0, end - WARM_TURN_CHUNKS) : end])

    # Internals

    def _on_disk(self, key: OffloadKey) -> bool:
        return self._disk is not None and self._disk.holds(key)

    def _at_peer(self, key: OffloadKey, wish: PromotionRequest) -> bool | None:
        """Return whether the request's source holds a chunk; None while that is not known yet."""
        if self.peers is None or wish.peer is None:
            return False
        return self.peers.is_held(key, wish.peer)

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
        self._groups.update(key[-GROUP_BYTES:] for key in keys)
        self._evicted(allocation.evicted)
        return allocation.slots

    def _evicted(self, keys: Sequence[OffloadKey]) -> None:
        self._say(Medium.CPU, True, keys)
        if self.lineage is not None:
            self.lineage.drop(keys)

    def _begin_read(self, key: OffloadKey, slot: int) -> bool:
        """Queue the read of a chunk, or free its slot if the disk's queue is full."""
        assert self._disk is not None
        if not self._disk.read(key, slot):
            self._cpu.abandon(key)
            return False
        self._reads[slot] = key
        return True

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
        """Begin to read the chunks that a request misses, from disk or from its source."""
        if self._held:
            return
        pulled: list[OffloadKey] = []
        slots: list[int] = []
        for i, key in enumerate(wish.missing):
            if self._cpu.state(key) is not ChunkState.ABSENT:
                continue
            on_disk = self._on_disk(key)
            if not on_disk and not self._at_peer(key, wish):
                continue
            allocated = self._allocate([key], protected)
            if allocated is None:
                self._refuse(wish, [key for key in wish.missing[i:] if self._cpu.state(key) is ChunkState.ABSENT])
                break
            if not on_disk:
                pulled.append(key)
                slots += allocated
                continue
            if not self._begin_read(key, allocated[0]):
                # The chunk is requested again in the next step.
                break
            wish.promoted.add(key)
        if pulled:
            assert self.peers is not None and wish.peer is not None
            self._pulls.update(zip(slots, pulled, strict=True))
            self.peers.pull(wish.peer, pulled, slots)

    def _refuse(self, wish: PromotionRequest, keys: Sequence[OffloadKey]) -> None:
        """Let a request continue without chunks for which there is no room."""
        wish.refused.update(keys)
        self.counts.promotions_refused += sum(map(self._on_disk, keys))
        if self.peers is not None and wish.peer is not None:
            self.peers.no_room(wish.peer, [key for key in keys if not self._on_disk(key)])

    def _collect(self) -> None:
        self._collect_pulls()
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

    def _collect_pulls(self) -> None:
        if self.peers is None:
            return
        for arrival in self.peers.poll():
            if arrival.slot in self._outdated:
                self._outdated.discard(arrival.slot)
                self._cpu.release(arrival.slot)
                continue
            key = arrival.key
            if self._pulls.get(arrival.slot) != key:
                # A second end of one transfer must not pass for the end of the slot's next one.
                continue
            del self._pulls[arrival.slot]
            if arrival.ok:
                self._arrived([key])
                self._write_behind(key)
            else:
                self._cpu.abandon(key)


def _do_nothing() -> None:
    """Do nothing."""
