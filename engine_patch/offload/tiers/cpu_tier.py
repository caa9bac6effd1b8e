# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's books: which chunk lies in which slot, and which slots may be written.

No bytes, no I/O, no clock, no lock; one thread. Invariants: a slot belongs to one key, or is free, or is withheld; free
+ used + withheld = num_slots; a key that is WRITING or pinned keeps its slot.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.policy import Policy, PolicyError

# Bytes of a key in a message, which are enough to distinguish keys.
SHOWN_BYTES = 12


class ChunkState(enum.Enum):
    """The state of a chunk in CPU memory."""

    # The chunk has no slot.
    ABSENT = "absent"
    # The chunk has a slot that is being filled.
    WRITING = "writing"
    # The chunk can be loaded.
    READY = "ready"


class WrongState(ValueError):
    """A call that the state of a chunk or a slot forbids, because the caller's books differ from the tier's.

    The call changed nothing.
    """


@dataclass(frozen=True, slots=True)
class Allocation:
    """The slots given to new chunks, and the chunks that were evicted for them."""

    # One slot for each key, in the order of the keys.
    slots: list[int]
    # Keys that were READY, in the order of their eviction.
    evicted: list[OffloadKey]


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots by use; free + writing + ready + withheld = num_slots."""

    num_slots: int
    free: int
    writing: int
    ready: int
    # The ready slots that are pinned.
    pinned: int
    withheld: int


class CpuTier:
    """The slots of one CPU tier.

    Lists of keys are in the order of the prompt. They are added and used last first, because the head of a prompt is
    worth more: without it the tail cannot be loaded.
    """

    def __init__(self, num_slots: int, policy: Policy) -> None:
        """Start with all slots free; `policy` must be empty and used by this tier alone."""
        if num_slots < 1:
            raise ValueError(
                f"a CPU tier has 1 slot or more, not {num_slots}: give it more memory, or use smaller chunks"
            )
        if len(policy):
            raise ValueError(f"the policy of a new CPU tier already holds {len(policy)} keys: give each tier its own")
        self.num_slots = num_slots
        # Keys evicted, and allocations refused for lack of room, since the start.
        self.evicted_total = 0
        self.refused_total = 0
        self._policy = policy
        # These hold plain numbers and bytes, which the garbage collector does not walk.
        self._slots: dict[OffloadKey, int] = {}
        self._writing: set[OffloadKey] = set()
        self._pins: dict[OffloadKey, int] = {}
        # The checksums of some READY chunks, each kept as long as its chunk.
        self.checksums: dict[OffloadKey, int] = {}
        # The lowest slot is taken first, so that memory pages that were never needed are never touched.
        self._free = list(range(num_slots - 1, -1, -1))
        # The number of transfers that must end before a slot of a cleared tier is free, by slot.
        self._withheld: dict[int, int] = {}

    def state(self, key: OffloadKey) -> ChunkState:
        """Return the state of a chunk."""
        if key not in self._slots:
            return ChunkState.ABSENT
        return ChunkState.WRITING if key in self._writing else ChunkState.READY

    def slot(self, key: OffloadKey) -> int:
        """Return the slot of a WRITING or READY chunk. Raise WrongState for an ABSENT one."""
        if key not in self._slots:
            raise self._wrong(key, "has no slot")
        return self._slots[key]

    def ready_keys(self) -> list[OffloadKey]:
        """Return all READY keys in the order in which they were allocated."""
        return [key for key in self._slots if key not in self._writing]

    def by_worth(self) -> list[OffloadKey]:
        """Return all READY keys, the most valuable first."""
        ranked = getattr(self._policy, "by_worth", None)
        keys = reversed(self._slots) if ranked is None else ranked()
        return [key for key in keys if key not in self._writing]

    def busy_slots(self) -> list[int]:
        """Return the slots that transfers may be using: once for a WRITING key, once for each pin of a pinned one."""
        slots = [self._slots[key] for key in self._writing]
        for key, count in self._pins.items():
            slots += [self._slots[key]] * count
        return slots

    @property
    def usage(self) -> Usage:
        """The present number of slots by use."""
        ready = len(self._slots) - len(self._writing)
        return Usage(self.num_slots, len(self._free), len(self._writing), ready, len(self._pins), len(self._withheld))

    def allocate(
        self, keys: Sequence[OffloadKey], protected: AbstractSet[OffloadKey] = frozenset()
    ) -> Allocation | None:
        """Allocate slots for ABSENT keys, which are then WRITING.

        Args:
            keys: The keys of new chunks.
            protected: Keys that must not be evicted, resident or not.

        Returns:
            The slots and the evicted keys, or None, with nothing changed, if there is no room for all of the keys.

        Raises:
            WrongState: A key is not ABSENT or is listed twice.
            PolicyError: The policy evicted a key that it must not evict.
        """
        if len(set(keys)) < len(keys):
            raise WrongState("a key comes twice in one allocation: name each chunk once")
        if not self._slots.keys().isdisjoint(keys):
            raise self._wrong(next(key for key in keys if key in self._slots), "cannot be allocated again")
        last_first = keys[::-1]
        evicted: list[OffloadKey] = []
        missing = len(keys) - len(self._free)
        if missing > 0:
            victims = self._evict(missing, protected, last_first)
            if victims is None:
                self.refused_total += 1
                return None
            evicted = victims
        slots = [self._free.pop() for _ in keys]
        self._slots.update(zip(keys, slots, strict=True))
        self._writing.update(keys)
        for key in last_first:
            self._policy.add(key)
        return Allocation(slots, evicted)

    def ready(self, key: OffloadKey) -> None:
        """Make a WRITING chunk READY, because it is complete. Raise WrongState for any other chunk."""
        if key not in self._writing:
            raise self._wrong(key, "cannot become READY")
        self._writing.remove(key)
        self._policy.evictable_again(key)

    def abandon(self, key: OffloadKey) -> None:
        """Free the slot of a WRITING chunk that will not be completed and that nothing writes.

        Raises WrongState for any other chunk.
        """
        if key not in self._writing:
            raise self._wrong(key, "cannot be abandoned")
        self._writing.remove(key)
        self._policy.discard(key)
        self._free_slot(key)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Add one pin to each READY chunk, which keeps its slot while pinned.

        Raises WrongState for any other chunk, and then pins none.
        """
        for key in keys:
            if key not in self._slots or key in self._writing:
                raise self._wrong(key, "cannot be pinned")
        pins = self._pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Remove one pin from each chunk.

        Raises WrongState for a key with fewer pins than are removed, and then removes none.
        """
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
        """Count a use of READY chunks.

        Other chunks are skipped, because a look-up while a chunk is being stored is no second use.
        """
        for key in reversed(keys):
            if key in self._slots and key not in self._writing:
                self._policy.touch(key)

    def discard(self, key: OffloadKey) -> bool:
        """Remove a READY chunk. Return False, with nothing changed, if it is not READY or is pinned."""
        if not self._evictable(key):
            return False
        self._policy.discard(key)
        self._free_slot(key)
        return True

    def clear(self, busy_slots: Iterable[int] | None = None) -> list[OffloadKey]:
        """Make all keys ABSENT, pinned and WRITING ones too, and return the keys that were READY.

        Args:
            busy_slots: The slots that transfers under way still read or write, each once for each of its transfers; by
                default the result of `busy_slots()`. They are withheld until `release` was called for each transfer.
                Slots that an earlier call withheld stay withheld, whether they are named again or not.

        Raises:
            WrongState: A number is no slot.
        """
        busy = Counter(self.busy_slots() if busy_slots is None else busy_slots)
        for slot in busy:
            if not 0 <= slot < self.num_slots:
                raise WrongState(f"slot {slot} cannot be withheld: this tier has slots 0 to {self.num_slots - 1}")
        ready_keys = self.ready_keys()
        # A slot that is already withheld has its count of transfers, and got no new ones since.
        self._withheld = dict(busy) | self._withheld
        self._slots.clear()
        self._writing.clear()
        self._pins.clear()
        self.checksums.clear()
        self._policy.clear()
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in self._withheld]
        return ready_keys

    def release(self, slot: int) -> None:
        """Count the end of one transfer that was under way when the tier was cleared.

        Raises WrongState if no transfer of the slot is awaited.
        """
        count = self._withheld.get(slot, 0)
        if not count:
            raise WrongState(f"slot {slot} is not withheld: release is for transfers that were under way at a clear")
        if count > 1:
            self._withheld[slot] = count - 1
        else:
            del self._withheld[slot]
            self._free.append(slot)

    def _free_slot(self, key: OffloadKey) -> None:
        self._free.append(self._slots.pop(key))
        self.checksums.pop(key, None)

    def _evictable(self, key: OffloadKey) -> bool:
        return key in self._slots and key not in self._writing and key not in self._pins

    def _evict(
        self, count: int, protected: AbstractSet[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Free `count` slots and return their keys, or None, with nothing changed, if that is impossible."""
        # Checked by counting beforehand, because the policy would have to look at every key.
        spare = len(self._slots) - len(self._writing) - len(self._pins)
        # Protected keys are looked up only if they could matter, because there can be thousands of them at each of many
        # small allocations.
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
        # These keys were protected for this one call only, and the policy may have set them aside.
        for key in spared:
            if self._evictable(key):
                self._policy.evictable_again(key)
        for key in victims:
            self._free_slot(key)
        self.evicted_total += count
        return victims

    def _check(self, victims: list[OffloadKey], count: int, protected: AbstractSet[OffloadKey]) -> None:
        """Raise PolicyError for victims that a third party's policy must not return: two chunks would share a slot."""
        chosen = set(victims)
        # Views of dicts make this look up the few victims and not the many pins.
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
