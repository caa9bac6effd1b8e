# SPDX-License-Identifier: Apache-2.0
"""The source's side: answers to readers, and the loans that keep their chunks in place. Pure: no socket, no clock.

A chunk that is lent keeps its slot until its reader returns it or its loan ends. A reader that reads after the end of
its loan may find another chunk's content, which its checksum reveals.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
MISS_OF_NO_SLOT = {
    # The chunk was there when the reader queried it.
    NO_SLOT: PeerMiss.EVICTED,
    OTHER_WEIGHTS: PeerMiss.RESETS,
    LENT_TOO_MUCH: PeerMiss.BUSY,
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

    def readable(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each chunk whether it can be read now; those that can are not the next to be evicted."""
        ...

    def lend(self, keys: Sequence[OffloadKey], num_resets: int, most: int, is_use: bool = True) -> list[int]:
        """Pin the first `most` chunks that can be read, and return the slot of each.

        The others have NO_SLOT if they cannot be read, else LENT_TOO_MUCH. If the tiers were not reset exactly `num_resets`
        times, nothing is lent, and each is OTHER_WEIGHTS. `is_use` says whether the chunks count as used.
        """
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


class _Loan(NamedTuple):
    keys: list[OffloadKey]
    num_resets: int
    until_s: float


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
        self._offer: _Offer | None = None

    @property
    def lent_chunks(self) -> int:
        """Chunks that are lent now."""
        return self._lent_chunks

    def answer(self, reader: bytes, message: ToLender, now_s: float) -> ToReader | None:
        """Return the answer to a reader's message, or None if it needs none.

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

    def _lend(self, reader: bytes, message: Borrow, keys: list[OffloadKey], now_s: float) -> ToReader:
        name = reader, message.number
        if name in self._loans:
            self.counts.bad_messages += 1
            return Refused(PeerMiss.PROTOCOL.value, "each loan of a reader needs a number of its own")
        room = max(self._max_lent_chunks - self._lent_chunks, 0)
        slots = self._tiers.lend(keys, message.resets, room, message.is_use)
        lent_keys = [key for key, slot in zip(keys, slots, strict=True) if slot >= 0]
        if lent_keys:
            # A number that is not one ends the loan at once, too.
            loan_s = min(message.loan_s, MAX_LOAN_S) if message.loan_s > 0 else 0.0
            self._loans[name] = _Loan(lent_keys, message.resets, now_s + loan_s)
            self._lent_chunks += len(lent_keys)
            self.counts.lent += len(lent_keys)
        try:
            sums = self._checksums(keys, slots, message.resets)
        except BaseException:
            self._end(name)
            raise
        return Lent(message.number, slots, sums)

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
            self._lent_chunks -= len(loan.keys)
            self._tiers.take_back(loan.keys, loan.num_resets)
