# SPDX-License-Identifier: Apache-2.0
"""The source's side: answers to readers, and the loans that keep their chunks in place. Pure: no socket, no clock.

A chunk that is lent keeps its slot until its reader returns it or its loan ends. A reader that reads after the end of
its loan may find another chunk's content, which its checksum reveals.

Where the disk is lent from, too, a loan waits until all of its chunks are in slots, and is answered then. Loans wait in
the order in which they came, and each leaves the room that those before it still need, so that none waits for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from kvrouter.engine_patch.offload.key import OffloadKey, short_hash
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_wire import (
    MAX_KEYS,
    MAX_LOAN_S,
    VERSION,
    Borrow,
    Hello,
    Lent,
    Offer,
    Offered,
    Present,
    Probe,
    Return,
    ToReader,
    Unknown,
    Welcome,
)
from kvrouter.engine_patch.offload.peer.shares import shares
from kvrouter.events.peer.hand_over import MAX_SHARES, Refused

# Readers that are remembered; the one that was silent longest is forgotten first, and says hello again.
MAX_READERS = 1_024
# A list of the chunks that are worth most is kept this long, so that all engines of a hand-over get shares of one list.
OFFER_S = 60.0
# The numbers in place of a slot, for chunks that are not lent.
NO_SLOT = -1
OTHER_WEIGHTS = -2
LENT_TOO_MUCH = -3
DISK_FAILED = -4
# This one is never sent: the chunk gets a slot later.
ON_DISK = -5
# Chunks that all loans together wait for at most: a few megabytes of keys.
MAX_WAITING_CHUNKS = 65_536
# Chunks that are looked at in one turn: a fraction of a millisecond, and more than are read in one.
TURN_CHUNKS = 512
MISS_OF_NO_SLOT = {
    # The chunk was there when the reader queried it.
    NO_SLOT: PeerMiss.EVICTED,
    OTHER_WEIGHTS: PeerMiss.RESETS,
    LENT_TOO_MUCH: PeerMiss.BUSY,
    DISK_FAILED: PeerMiss.DISK,
}


# The messages of readers; the others begin or query a hand-over.
ToLender: TypeAlias = Hello | Probe | Offer | Borrow | Return


class PeerFacts(NamedTuple):
    """The facts that both engines must share."""

    # The digest of the model, its layout and the naming of blocks.
    identity: bytes
    # The first parent hash; empty while the engine has not chosen it yet.
    hash_root: bytes

    def differs(self, hello: Hello) -> tuple[PeerMiss, str] | None:
        """Return the first difference to a reader's facts, with a sentence, or None if there is none."""
        if hello.version != VERSION:
            return PeerMiss.PROTOCOL, f"the source speaks version {VERSION} of the peer protocol, not {hello.version}"
        if hello.identity != self.identity:
            return PeerMiss.LAYOUT, "the source has another model, block size, cache layout or division among ranks"
        if hello.hash_root != self.hash_root:
            return PeerMiss.SEED, "the source hashes blocks with another seed: start both with one PYTHONHASHSEED"
        return None


class Lendable(Protocol):
    """The tiers, as the thread that lends uses them."""

    @property
    def num_resets(self) -> int:
        """The number of resets of the tiers."""
        ...

    @property
    def lends_disk(self) -> bool:
        """Whether chunks that only the disk holds are lent, too."""
        ...

    def readable(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each chunk whether it can be lent; those that can are not the next to be evicted."""
        ...

    def lend(self, keys: Sequence[OffloadKey], num_resets: int, most: int, is_use: bool = True) -> list[int]:
        """Pin the first `most` chunks that can be lent, and return the slot of each, or ON_DISK for one that has none yet.

        The others have NO_SLOT if they cannot be lent, else LENT_TOO_MUCH. If the tiers were not reset exactly `num_resets`
        times, nothing is lent, and each is OTHER_WEIGHTS. `is_use` says whether the chunks count as used.
        """
        ...

    def read_to_lend(self, keys: Sequence[OffloadKey], num_resets: int) -> set[OffloadKey]:
        """Begin to read chunks that only the disk holds, as far as readers may use it; return those without a slot."""
        ...

    def by_worth(self) -> tuple[list[OffloadKey], dict[int, int]]:
        """Return all chunks that can be read, the most valuable first, and the known blocks before blocks."""
        ...

    def checksums(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return the checksums of those chunks that were lent before, and are the same since."""
        ...

    def keep_checksums(self, checksums: Mapping[OffloadKey, int], num_resets: int) -> None:
        """Remember the checksums of chunks that were lent when the tiers had been reset `num_resets` times."""
        ...

    def take_back(self, keys: Sequence[OffloadKey], num_resets: int) -> None:
        """Unpin chunks that were lent when the tiers had been reset `num_resets` times."""
        ...


@dataclass(slots=True)
class LenderCounts:
    """Counts since the start, in chunks unless noted."""

    lent: int = 0
    # Lent chunks that were on disk alone when they were borrowed, those that could not be read, and those that were not read
    # when their loan ended.
    lent_from_disk: int = 0
    disk_failed: int = 0
    disk_late: int = 0
    # Loans that expired before their reader ended them.
    expired_loans: int = 0
    # Messages that were not understood, or that belong to no reader.
    bad_messages: int = 0
    # Readers whose facts differ, or whose public keys are not listed.
    refused_readers: int = 0


class _Offer(NamedTuple):
    num_resets: int
    until_s: float
    shares: list[list[OffloadKey]]
    before: dict[int, int]


@dataclass(slots=True)
class _Loan:
    borrowed: list[OffloadKey]
    num_resets: int
    is_use: bool
    until_s: float
    # For each borrowed chunk its slot, or a number in place of one.
    slots: list[int]
    # The places of the chunks that have no slot yet.
    waiting: list[int]
    # The chunks that are pinned.
    lent: list[OffloadKey] = field(default_factory=list)


class Lender:
    """The readers of one source, and its loans to them."""

    def __init__(
        self,
        tiers: Lendable,
        facts: Callable[[], PeerFacts],
        welcome: Welcome,
        checksum: Callable[[OffloadKey, int], int],
        max_lent_chunks: int,
    ) -> None:
        """Start without readers.

        Args:
            tiers: The tiers whose chunks are lent.
            facts: Returns the facts of this engine.
            welcome: The answer to a reader whose facts are the same.
            checksum: Returns the checksum of a key and the content of its slot.
            max_lent_chunks: How many chunks may be lent at once, because they cannot be evicted meanwhile.
        """
        self.counts = LenderCounts()
        self._tiers = tiers
        self._facts = facts
        self._welcome = welcome
        self._checksum = checksum
        self._max_lent_chunks = max_lent_chunks
        self._lent_chunks = 0
        self._readers: OrderedDict[bytes, None] = OrderedDict()
        self._loans: dict[tuple[bytes, int], _Loan] = {}
        # The loans that are not answered yet, in the order in which they came.
        self._waiting: dict[tuple[bytes, int], _Loan] = {}
        self._offer: _Offer | None = None

    @property
    def lent_chunks(self) -> int:
        """Chunks that are lent now."""
        return self._lent_chunks

    @property
    def is_waiting(self) -> bool:
        """Whether a loan waits for the disk or for room."""
        return bool(self._waiting)

    def answer(self, reader: bytes, message: ToLender, now_s: float) -> ToReader | None:
        """Return the answer to a reader's message, or None if it needs none, or none yet: `advance` yields it then.

        Args:
            reader: The reader's connection.
            message: The message.
            now_s: The present time.
        """
        if isinstance(message, Hello):
            return self._hello(reader, message)
        if isinstance(message, Return):
            self._end((reader, message.number))
            return None
        if reader not in self._readers:
            return Unknown(message.number)
        self._readers.move_to_end(reader)
        if isinstance(message, Offer):
            return self._offered(message, now_s)
        if len(message.keys) > MAX_KEYS:
            self.counts.bad_messages += 1
            return Refused(PeerMiss.PROTOCOL.value, f"at most {MAX_KEYS} chunks can be named in one message")
        keys = [OffloadKey(key) for key in message.keys]
        if isinstance(message, Probe):
            if message.resets != self._tiers.num_resets:
                return Present(message.number, bytes(len(keys)), PeerMiss.RESETS.value)
            return Present(message.number, bytes(self._tiers.readable(keys)))
        return self._lend(reader, message, keys, now_s)

    def advance(self) -> Iterator[tuple[bytes, ToReader]]:
        """Do a bounded share of the work of the loans that wait, and yield readers with the answers that are complete."""
        reserved = 0
        left = TURN_CHUNKS
        for name, loan in list(self._waiting.items()):
            if not left:
                break
            places = loan.waiting[:left]
            left -= len(places)
            try:
                # Only loans that are answered end by themselves, so only they make room for the first one that waits.
                self._fill(loan, places, reserved, reserved > 0 or len(self._loans) > len(self._waiting))
                reserved += len(loan.waiting)
                answer = None if loan.waiting else self._answered(name, loan)
            except BaseException:
                self._end(name)
                raise
            if answer is not None:
                yield name[0], answer

    def expire(self, now_s: float) -> None:
        """End the loans whose time is over, and drop an old offer."""
        if self._offer is not None and self._offer.until_s <= now_s:
            self._offer = None
        for name in [name for name, loan in self._loans.items() if loan.until_s <= now_s]:
            self.counts.expired_loans += 1
            self._end(name)

    def next_end_s(self) -> float | None:
        """Return when the next loan ends, or None without loans."""
        return min((loan.until_s for loan in self._loans.values()), default=None)

    def close(self) -> None:
        """End all loans."""
        for name in list(self._loans):
            self._end(name)

    def _hello(self, reader: bytes, hello: Hello) -> ToReader:
        difference = self._facts().differs(hello)
        if difference is not None:
            self.counts.refused_readers += 1
            self._readers.pop(reader, None)
            return Refused(difference[0].value, difference[1])
        self._readers[reader] = None
        self._readers.move_to_end(reader)
        while len(self._readers) > MAX_READERS:
            self._readers.popitem(last=False)
        return self._welcome

    def _offered(self, message: Offer, now_s: float) -> ToReader:
        if not 0 <= message.share < message.num_shares <= MAX_SHARES or message.skip < 0:
            self.counts.bad_messages += 1
            return Refused(
                PeerMiss.PROTOCOL.value, f"a share has an index below the number of shares, {MAX_SHARES} at most"
            )
        num_resets = self._tiers.num_resets
        if message.resets != num_resets:
            return Offered(message.number, 0, [], [], PeerMiss.RESETS.value)
        offer = self._offer
        if offer is None or offer.num_resets != num_resets or len(offer.shares) != message.num_shares:
            keys, before = self._tiers.by_worth()
            offer = self._offer = _Offer(num_resets, now_s + OFFER_S, shares(keys, before, message.num_shares), before)
        share = offer.shares[message.share]
        page = share[message.skip : message.skip + MAX_KEYS]
        return Offered(message.number, len(share), list(page), [offer.before.get(short_hash(key), 0) for key in page])

    def _lend(self, reader: bytes, message: Borrow, keys: list[OffloadKey], now_s: float) -> ToReader | None:
        name = reader, message.number
        if name in self._loans:
            self.counts.bad_messages += 1
            return Refused(PeerMiss.PROTOCOL.value, "each loan of a reader needs a number of its own")
        # A number that is not one ends the loan at once, too.
        loan_s = min(message.loan_s, MAX_LOAN_S) if message.loan_s > 0 else 0.0
        places = list(range(len(keys)))
        loan = _Loan(keys, message.resets, message.is_use, now_s + loan_s, [NO_SLOT] * len(keys), places)
        reserved = sum(len(earlier.waiting) for earlier in self._waiting.values())
        has_others = self._tiers.lends_disk and bool(self._loans)
        self._loans[name] = loan
        try:
            self._fill(loan, places, reserved, has_others)
            if reserved + len(loan.waiting) > MAX_WAITING_CHUNKS:
                for place in loan.waiting:
                    loan.slots[place] = LENT_TOO_MUCH
                loan.waiting.clear()
            if loan.waiting:
                self._waiting[name] = loan
                return None
            return self._answered(name, loan)
        except BaseException:
            self._end(name)
            raise

    def _fill(self, loan: _Loan, places: Sequence[int], reserved: int, may_wait: bool) -> None:
        """Lend those of a loan's chunks that have a slot by now.

        Args:
            loan: The loan.
            places: The places of the chunks to look at, the first ones of those that wait.
            reserved: Chunks that earlier loans wait for.
            may_wait: Whether to wait for room.
        """
        tiers = self._tiers
        keys = [loan.borrowed[place] for place in places]
        room = max(self._max_lent_chunks - self._lent_chunks - reserved, 0)
        # Chunks that cannot be lent yet would take the place of those that can.
        to_read = keys[: min(room, TURN_CHUNKS)]
        without_slot = tiers.read_to_lend(to_read, loan.num_resets) if tiers.lends_disk else set()
        still_waiting: list[int] = []
        for place, key, slot in zip(places, keys, tiers.lend(keys, loan.num_resets, room, loan.is_use), strict=True):
            was_on_disk = loan.slots[place] == ON_DISK
            if slot == ON_DISK and key in without_slot and not may_wait:
                slot = LENT_TOO_MUCH
            if slot == ON_DISK or (slot == LENT_TOO_MUCH and may_wait):
                still_waiting.append(place)
                slot = ON_DISK if was_on_disk else slot
            elif slot >= 0:
                loan.lent.append(key)
                self._lent_chunks += 1
                self.counts.lent_from_disk += was_on_disk
            elif slot == NO_SLOT and was_on_disk:
                slot = DISK_FAILED
                self.counts.disk_failed += 1
            loan.slots[place] = slot
        loan.waiting[: len(places)] = still_waiting

    def _answered(self, name: tuple[bytes, int], loan: _Loan) -> Lent:
        """Return the answer to a loan, all of whose chunks have a slot or none."""
        self._waiting.pop(name, None)
        sums = self._checksums(loan.borrowed, loan.slots, loan.num_resets)
        if loan.lent and self._tiers.num_resets != loan.num_resets:
            # The checksums may be those of what was stored after a reset.
            self._end(name)
            return Lent(name[1], [OTHER_WEIGHTS] * len(sums), [0] * len(sums))
        if loan.lent:
            self.counts.lent += len(loan.lent)
        else:
            del self._loans[name]
        return Lent(name[1], loan.slots, sums)

    def _checksums(self, keys: Sequence[OffloadKey], slots: Sequence[int], num_resets: int) -> list[int]:
        """Return the checksums of chunks that are lent, and 0 for the others."""
        known = self._tiers.checksums(keys)
        computed = {
            key: self._checksum(key, slot)
            for key, slot in zip(keys, slots, strict=True)
            if slot >= 0 and key not in known
        }
        self._tiers.keep_checksums(computed, num_resets)
        known |= computed
        return [known[key] if slot >= 0 else 0 for key, slot in zip(keys, slots, strict=True)]

    def _end(self, name: tuple[bytes, int]) -> None:
        loan = self._loans.pop(name, None)
        if loan is not None:
            if self._waiting.pop(name, None) is not None:
                self.counts.disk_late += len(loan.waiting)
            self._lent_chunks -= len(loan.lent)
            self._tiers.take_back(loan.lent, loan.num_resets)
