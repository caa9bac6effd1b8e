# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the peer tier: what to query from which source, what to fetch, and how long to wait for it.

It is used in the scheduler's thread; `peer/peer_client.py` does the work in its own. No request waits beyond its
deadline: then its missing chunks are computed, and each of them is counted with the reason. A slot that is being filled
too late stays reserved until the transfer has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.peer_link import (
    Outcome,
    Probed,
    ProbeJob,
    Pulled,
    PullJob,
    Question,
    Shared,
    ShareJob,
)
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource, SourceWish
from kvrouter.engine_patch.offload.peer.peer_wire import MAX_KEYS
from kvrouter.engine_patch.offload.tiers.peer_wish import PeerWish


class Fetcher(Protocol):
    """The part of `PeerClient` that is used here."""

    def submit(self, source: PeerSource, work: Question | PullJob) -> None:
        """Queue a job."""
        ...

    def poll(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        ...

    def close(self) -> None:
        """End the thread."""
        ...


class Arrival(NamedTuple):
    """The end of a chunk's transfer; its slot may be used from now on."""

    key: OffloadKey
    slot: int
    # Whether the slot holds the chunk.
    ok: bool


class _Pull(NamedTuple):
    wish: PeerWish
    # The slot distinguishes this transfer from one of the same chunk that began before a reset and has not ended.
    slot: int
    deadline_s: float


class PeerTier:
    """The chunks of other engines, as far as requests name those engines."""

    def __init__(self, fetcher: Fetcher, timeout_s: float, clock: Callable[[], float]) -> None:
        """Start with nothing under way.

        Args:
            fetcher: Does the work.
            timeout_s: How long requests wait that name no timeout.
            clock: Returns seconds.
        """
        # Chunks that arrived for requests, and those that did not, by reason, since the start.
        self.pulled = 0
        self.misses: Counter[PeerMiss] = Counter()
        self._fetcher = fetcher
        # The number of resets of this engine, which must equal that of its sources.
        self._num_resets = 0
        self._timeout_s = timeout_s
        self._clock = clock
        self._next_number = 0
        self._probes: dict[int, tuple[PeerWish, Sequence[OffloadKey]]] = {}
        self._pulls: dict[OffloadKey, _Pull] = {}
        # The answers of a hand-over's source that were not taken yet.
        self._shared: dict[int, Shared] = {}

    @property
    def busy(self) -> bool:
        """Whether a transfer for a request is under way that is not overdue."""
        now_s = self._clock()
        return any(pull.deadline_s > now_s and not pull.wish.is_hand_over for pull in self._pulls.values())

    @property
    def timeout_s(self) -> float:
        """How long requests wait that name no timeout."""
        return self._timeout_s

    def wish(self, given: SourceWish) -> PeerWish:
        """Return the state of a request that names a source."""
        return PeerWish(given.source, self._timeout_s if given.timeout_s is None else given.timeout_s)

    def is_held(self, key: OffloadKey, wish: PeerWish) -> bool | None:
        """Return whether the source holds a chunk; None while it is not known yet.

        After the first call for a chunk, `query` sends the question.
        """
        if key not in wish.presence:
            if wish.deadline_s is None:
                wish.deadline_s = self._clock() + wish.timeout_s
            wish.presence[key] = None
            wish.unqueried.append(key)
        presence = wish.presence[key]
        if isinstance(presence, PeerMiss):
            return False
        if self._is_late(wish):
            self._miss(key, wish, PeerMiss.DEADLINE)
            return False
        return presence

    def is_overdue(self, key: OffloadKey, wish: PeerWish | None) -> bool:
        """Return whether a chunk is being fetched too late for a request.

        It is too late after the deadline of the request for which it is fetched, and after the request's own if it names
        a source.
        """
        pull = self._pulls.get(key)
        if pull is None:
            return False
        if pull.deadline_s <= self._clock():
            self._miss(key, pull.wish, PeerMiss.DEADLINE)
        elif wish is None or not self._is_late(wish):
            return False
        if wish is not None:
            self._miss(key, wish, PeerMiss.DEADLINE)
        return True

    def query(self, wish: PeerWish) -> None:
        """Query which of the chunks that were looked up since the last call the source holds."""
        for start in range(0, len(wish.unqueried), MAX_KEYS):
            keys = wish.unqueried[start : start + MAX_KEYS]
            number = self._number()
            self._probes[number] = wish, keys
            assert wish.deadline_s is not None
            self._fetcher.submit(wish.source, ProbeJob(number, keys, self._num_resets, wish.deadline_s))
        wish.unqueried = []

    def pull(self, wish: PeerWish, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Fetch chunks that the source holds into slots."""
        assert wish.deadline_s is not None
        for start in range(0, len(keys), MAX_KEYS):
            part, part_slots = keys[start : start + MAX_KEYS], slots[start : start + MAX_KEYS]
            for key, slot in zip(part, part_slots, strict=True):
                self._pulls[key] = _Pull(wish, slot, wish.deadline_s)
            self._fetcher.submit(
                wish.source,
                PullJob(self._number(), part, part_slots, self._num_resets, wish.deadline_s, wish.is_hand_over),
            )

    def ask_share(self, source: PeerSource, share: int, num_shares: int, skip: int, deadline_s: float) -> int:
        """Send a question for the chunks of a share, and return its number; `take_shared` returns the answer."""
        number = self._number()
        self._fetcher.submit(source, ShareJob(number, share, num_shares, skip, self._num_resets, deadline_s))
        return number

    def take_shared(self, number: int) -> Shared | None:
        """Return the answer to a question of `ask_share`, or None if there is none yet."""
        return self._shared.pop(number, None)

    def no_room(self, wish: PeerWish, keys: Sequence[OffloadKey]) -> None:
        """Note that there is no room for chunks that the source holds."""
        for key in keys:
            self._miss(key, wish, PeerMiss.NO_ROOM)

    def poll(self) -> list[Arrival]:
        """Return the transfers that ended since the last call."""
        arrivals: list[Arrival] = []
        for outcome in self._fetcher.poll():
            if isinstance(outcome, Probed):
                self._take_probed(outcome)
            elif isinstance(outcome, Shared):
                # Only the last answer is kept, because a hand-over that ended takes none.
                self._shared = {outcome.number: outcome}
            else:
                arrivals.append(self._take_pulled(outcome))
        return arrivals

    def forget(self, wish: PeerWish) -> None:
        """Forget what a request knows, because it has ended."""
        wish.unqueried = []
        for number in [number for number, (prober, _) in self._probes.items() if prober is wish]:
            del self._probes[number]

    def clear(self) -> None:
        """Forget all transfers under way, because of a reset: their slots are the caller's business."""
        self._num_resets += 1
        self._probes.clear()
        self._pulls.clear()

    def close(self) -> None:
        """End all work."""
        self._fetcher.close()

    def _take_probed(self, probed: Probed) -> None:
        wish, keys = self._probes.pop(probed.number, (None, ()))
        if wish is None:
            return
        for key, held in zip(keys, probed.held, strict=True):
            if held:
                # A chunk that was already given up stays so.
                wish.presence[key] = wish.presence[key] or True
            else:
                self._miss(key, wish, probed.miss or PeerMiss.ABSENT)

    def _take_pulled(self, pulled: Pulled) -> Arrival:
        pull = self._pulls.get(pulled.key)
        if pull is not None and pull.slot == pulled.slot:
            del self._pulls[pulled.key]
            if pulled.miss is None:
                self.pulled += not pull.wish.is_hand_over
                pull.wish.pulled.add(pulled.key)
            else:
                self._miss(pulled.key, pull.wish, pulled.miss)
        return Arrival(pulled.key, pulled.slot, pulled.miss is None)

    def _miss(self, key: OffloadKey, wish: PeerWish, miss: PeerMiss) -> None:
        """Note why a chunk does not come; the first reason counts."""
        if not isinstance(wish.presence.get(key), PeerMiss):
            wish.presence[key] = miss
            self.misses[miss] += not wish.is_hand_over

    def _is_late(self, wish: PeerWish) -> bool:
        return wish.deadline_s is not None and wish.deadline_s <= self._clock()

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number
