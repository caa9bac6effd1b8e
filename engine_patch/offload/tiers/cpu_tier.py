# SPDX-License-Identifier: Apache-2.0
"""Which chunk lies in which slot of CPU memory, and which slots may be written.

Pure bookkeeping: no bytes, no I/O, no clock, no lock; one thread. Invariants: a slot belongs to one key, or is free, or
is withheld; free + used + withheld = num_slots; what is WRITING or pinned keeps its slot.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.policy import Policy, PolicyError

# Enough to distinguish keys in a message.
SHOWN_BYTES = 12


class ChunkState(enum.Enum):
    """ABSENT: no slot. WRITING: a slot that is being filled. READY: can be loaded."""

    ABSENT = "absent"
    WRITING = "writing"
    READY = "ready"


class WrongState(ValueError):
    """A call that the state of a chunk or of a slot forbids: the caller's books differ from the tier's. Nothing was
    changed."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """slots: one for each key, in the order of the keys. evicted: keys that were READY, as they went."""

    slots: list[int]
    evicted: list[OffloadKey]


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots by use: free + writing + ready + withheld = num_slots. pinned: those of the ready that are pinned."""

    num_slots: int
    free: int
    writing: int
    ready: int
    pinned: int
    withheld: int


class CpuTier:
    """The slots of one CPU tier. policy: empty, and used by this tier alone.

    Lists of keys are in the order of the prompt. They are added and used last first, because the head of a prompt is
    worth more: without it the tail cannot be loaded."""

    def __init__(self, num_slots: int, policy: Policy) -> None:
        if num_slots < 1:
            raise ValueError(
                f"a CPU tier has 1 slot or more, not {num_slots}: give it more memory, or use smaller chunks"
            )
        if len(policy):
            raise ValueError(f"the policy of a new CPU tier already holds {len(policy)} keys: give each tier its own")
        self.num_slots = num_slots
        # Keys evicted, and allocations refused for want of room, since the start.
        self.evicted_total = 0
        self.refused_total = 0
        self._policy = policy
        # Plain numbers and bytes, which the garbage collector does not walk.
        self._slots: dict[OffloadKey, int] = {}
        self._writing: set[OffloadKey] = set()
        self._pins: dict[OffloadKey, int] = {}
        # The lowest slot is taken first: pages of memory that were never needed are never touched.
        self._free = list(range(num_slots - 1, -1, -1))
        # Transfers that must end before a slot of an emptied tier is free.
        self._withheld: dict[int, int] = {}

    def state(self, key: OffloadKey) -> ChunkState:
        if key not in self._slots:
            return ChunkState.ABSENT
        return ChunkState.WRITING if key in self._writing else ChunkState.READY

    def slot(self, key: OffloadKey) -> int:
        """Where a WRITING or READY chunk lies. Raises WrongState for an ABSENT one."""
        if key not in self._slots:
            raise self._wrong(key, "has no slot")
        return self._slots[key]

    def ready_keys(self) -> list[OffloadKey]:
        """All READY keys, in the order in which they were allocated."""
        return [key for key in self._slots if key not in self._writing]

    def busy_slots(self) -> list[int]:
        """The slots that transfers may be using: once for a WRITING key, once for each pin of a pinned one."""
        slots = [self._slots[key] for key in self._writing]
        for key, count in self._pins.items():
            slots += [self._slots[key]] * count
        return slots

    @property
    def usage(self) -> Usage:
        ready = len(self._slots) - len(self._writing)
        return Usage(self.num_slots, len(self._free), len(self._writing), ready, len(self._pins), len(self._withheld))

    def allocate(
        self, keys: Sequence[OffloadKey], protected: AbstractSet[OffloadKey] = frozenset()
    ) -> Allocation | None:
        """Slots for ABSENT keys, which are WRITING then; None and nothing changed where there is no room for all of
        them.

        protected: keys that must not make room, resident or not. Raises WrongState for a key that is not ABSENT or
        comes twice, and PolicyError where a policy evicts what it must not."""
        if len(set(keys)) < len(keys):
            raise WrongState("a key comes twice in one allocation: name each chunk once")
        if not self._slots.keys().isdisjoint(keys):
            raise self._wrong(next(key for key in keys if key in self._slots), "cannot be allocated again")
        last_first = keys[::-1]
        evicted: list[OffloadKey] = []
        missing = len(keys) - len(self._free)
        if missing > 0:
            found = self._evict(missing, protected, last_first)
            if found is None:
                self.refused_total += 1
                return None
            evicted = found
        slots = [self._free.pop() for _ in keys]
        self._slots.update(zip(keys, slots, strict=True))
        self._writing.update(keys)
        for key in last_first:
            self._policy.add(key)
        return Allocation(slots, evicted)

    def ready(self, key: OffloadKey) -> None:
        """A WRITING chunk is whole. Raises WrongState for any other."""
        if key not in self._writing:
            raise self._wrong(key, "cannot become READY")
        self._writing.remove(key)
        self._policy.evictable_again(key)

    def abandon(self, key: OffloadKey) -> None:
        """A WRITING chunk will not be whole, and nothing writes it: its slot is free. Raises WrongState for
        any other."""
        if key not in self._writing:
            raise self._wrong(key, "cannot be abandoned")
        self._writing.remove(key)
        self._policy.discard(key)
        self._free.append(self._slots.pop(key))

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Keeps READY chunks where they are, once more each. Raises WrongState for any other, and then pins none."""
        for key in keys:
            if key not in self._slots or key in self._writing:
                raise self._wrong(key, "cannot be pinned")
        pins = self._pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Takes back one pin of each. Raises WrongState for a key with fewer pins than that, and then takes none."""
        for key, count in Counter(keys).items():
            if self._pins.get(key, 0) < count:
                raise self._wrong(key, f"has {self._pins.get(key, 0)} pins, {count} of them cannot be taken back")
        pins = self._pins
        for key in reversed(keys):
            if pins[key] > 1:
                pins[key] -= 1
            else:
                del pins[key]
                self._policy.evictable_again(key)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Counts a use of READY chunks. Others are skipped: a lookup while a chunk is being stored is no second use."""
        for key in reversed(keys):
            if key in self._slots and key not in self._writing:
                self._policy.touch(key)

    def discard(self, key: OffloadKey) -> bool:
        """Takes a READY chunk out. False, and nothing changed, where it is not READY or is pinned."""
        if not self._evictable(key):
            return False
        self._policy.discard(key)
        self._free.append(self._slots.pop(key))
        return True

    def clear(self, busy_slots: Iterable[int] | None = None) -> list[OffloadKey]:
        """Makes all keys ABSENT, pinned and WRITING ones too. Returns those that were READY.

        busy_slots: the slots that transfers under way still read or write, a slot once for each of its transfers; by
        default what `busy_slots()` says. They are withheld until `release` was called for each transfer, and what an
        earlier call withheld stays so, named again or not. Raises WrongState for a number that is no slot."""
        busy = Counter(self.busy_slots() if busy_slots is None else busy_slots)
        for slot in busy:
            if not 0 <= slot < self.num_slots:
                raise WrongState(f"slot {slot} cannot be withheld: this tier has slots 0 to {self.num_slots - 1}")
        gone = self.ready_keys()
        # What is withheld already has its count of transfers, and no new ones since.
        self._withheld = dict(busy) | self._withheld
        self._slots.clear()
        self._writing.clear()
        self._pins.clear()
        self._policy.clear()
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in self._withheld]
        return gone

    def release(self, slot: int) -> None:
        """One transfer that was under way when the tier was cleared has ended. Raises WrongState where none is waited
        for."""
        count = self._withheld.get(slot, 0)
        if not count:
            raise WrongState(f"slot {slot} is not withheld: release is for transfers that were under way at a clear")
        if count > 1:
            self._withheld[slot] = count - 1
        else:
            del self._withheld[slot]
            self._free.append(slot)

    def _evictable(self, key: OffloadKey) -> bool:
        return key in self._slots and key not in self._writing and key not in self._pins

    def _evict(
        self, count: int, protected: AbstractSet[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Frees `count` slots; None and nothing changed where that cannot be."""
        # Counted beforehand: the policy would have to look at every key.
        spare = len(self._slots) - len(self._writing) - len(self._pins)
        # Protected keys are looked up only where they could matter: there can be thousands, at each of many small
        # allocations.
        if spare - len(protected) < count and spare - sum(map(self._evictable, protected)) < count:
            return None
        writing, pins = self._writing, self._pins
        spared: list[OffloadKey] = []

        def may_evict(key: OffloadKey) -> bool:
            if key in protected:
                spared.append(key)
                return False
            return key not in writing and key not in pins

        victims = self._policy.victims(count, may_evict, incoming)
        if victims is None:
            return None
        self._check(victims, count, protected)
        # Protected for this one call: the policy may have set them aside.
        for key in spared:
            if self._evictable(key):
                self._policy.evictable_again(key)
        for key in victims:
            self._free.append(self._slots.pop(key))
        self.evicted_total += count
        return victims

    def _check(self, victims: list[OffloadKey], count: int, protected: AbstractSet[OffloadKey]) -> None:
        """A stranger's policy must not make two chunks share a slot."""
        chosen = set(victims)
        # Views of dicts, so that the few victims are looked up and not the many pins.
        if (
            len(chosen) != count
            or len(victims) != count
            or not chosen <= self._slots.keys()
            or not chosen.isdisjoint(self._writing)
            or not self._pins.keys().isdisjoint(chosen)
            or any(key in protected for key in victims)
        ):
            raise PolicyError(
                f"eviction policy {type(self._policy).__name__} gave {len(victims)} victims that are not {count} different "
                "chunks that may be evicted; it must obey may_evict and count"
            )

    def _wrong(self, key: OffloadKey, what: str) -> WrongState:
        return WrongState(f"chunk {key[:SHOWN_BYTES].hex()} is {self.state(key).name} and {what}")
