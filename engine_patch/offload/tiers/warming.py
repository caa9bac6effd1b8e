# SPDX-License-Identifier: Apache-2.0
"""One hand-over on the side that receives: which chunks of the source's share are fetched next, and when it ends. Pure.

Chunks come in batches, one at a time, so that requests' own chunks never wait for more than one of them. They take free
slots, and then the slots of as many chunks as each engine gives up when the caches of `num_shares + 1` engines are to fit
into `num_shares`: those are worth least here, and the source offers what is worth most there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.peer.peer_link import LOAN_MARGIN_S, Shared
from kvrouter.engine_patch.offload.peer.peer_miss import PeerMiss
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource
from kvrouter.engine_patch.offload.tiers.peer_wish import PeerWish
from kvrouter.events.peer.hand_over import Warm, Warmed, WarmEnd

# Bytes of one batch: four of the pieces in which a link copies, all of which may be under way at once.
BATCH_BYTES = 16 << 20
# Batches in a row that may fail before the source is given up.
MAX_FAILURES = 3
# Reasons for which one chunk is missing while the source goes on.
OF_ONE_CHUNK = frozenset({PeerMiss.EVICTED, PeerMiss.CHECKSUM})
# Reasons that may pass.
PASSING = frozenset({PeerMiss.DEADLINE, PeerMiss.STALLED, PeerMiss.BUSY})


class Batch(NamedTuple):
    """Chunks that are being fetched."""

    wish: PeerWish
    keys: list[OffloadKey]
    # The short hash of the block before each chunk, or 0.
    before: list[int]


class Warming:
    """The progress of one hand-over."""

    def __init__(
        self, warm: Warm, chunk_bytes: int, num_slots: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """Start without anything under way.

        Args:
            warm: The request.
            chunk_bytes: Bytes of a chunk.
            num_slots: The slots of the CPU tier.
            timeout_s: How long one batch may take.
            clock: Returns seconds.
        """
        self.number, self.share, self.num_shares = warm.number, warm.share, warm.num_shares
        self.source = PeerSource(warm.host, warm.port)
        self._chunk_bytes, self._timeout_s, self._clock = chunk_bytes, timeout_s, clock
        self._until_s = clock() + warm.within_s
        # The most chunks of the next batch; fewer after the source lent only a part.
        self._max_batch_chunks = max(1, BATCH_BYTES // chunk_bytes)
        self.batch_chunks = self._max_batch_chunks
        self.chunks_left = warm.max_bytes // chunk_bytes
        self.evictions_left = num_slots // (warm.num_shares + 1)
        # Chunks that were offered and neither fetched nor passed over yet, each with the block before it, or 0.
        self.queue: deque[tuple[OffloadKey, int]] = deque()
        # The chunks that were fetched, in the order in which they were offered.
        self.fetched: list[OffloadKey] = []
        self.end = ""
        # Whether the source has named all chunks of the share.
        self.knows_all = False
        # Whether the chunks that arrived are in the order of their worth.
        self.is_ordered = False
        self._offered = self._known = self._present = self._missed = self._evicted = 0
        self._failures = 0
        self._pause_until_s = clock()
        # The number of the question for more chunks that is not answered yet.
        self.question: int | None = None
        self.batch: Batch | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether an answer or a batch is under way, or a pause."""
        return self.question is not None or self.batch is not None or self._clock() < self._pause_until_s

    @property
    def skip(self) -> int:
        """The chunks of the share that the source has named."""
        return self._known

    def deadline_s(self) -> float:
        """Return when an answer or a batch that begins now is overdue."""
        return min(self._clock() + self._timeout_s, max(self._until_s, self._clock()))

    def check_time(self) -> None:
        """End the hand-over if its time is over."""
        if not self.end and self._clock() >= self._until_s:
            self.end = WarmEnd.TIME

    def take_shared(self, shared: Shared) -> None:
        """Take the source's answer to a question for more chunks."""
        self.question = None
        if shared.miss is not None:
            self._failed(shared.miss)
            return
        self._failures = 0
        self._offered = shared.total
        self._known += len(shared.keys)
        self.queue.extend(zip(shared.keys, shared.before, strict=True))
        self.knows_all = not shared.keys or self._known >= shared.total

    def pass_over(self) -> None:
        """Note that an offered chunk is here already."""
        self._present += 1

    def begin(self, batch: Batch, evicted: int) -> None:
        """Note a batch for which chunks were evicted."""
        self.batch = batch
        self._evicted += evicted
        self.evictions_left -= evicted
        self.chunks_left -= len(batch.keys)

    def check_batch(self) -> Batch | None:
        """Return the batch if all of its transfers have ended, after noting their outcomes; else None.

        After the end of the hand-over, a batch that is overdue is returned, too, so that a transfer that never ends keeps
        neither the thread nor the next hand-over waiting. Its slots stay reserved.
        """
        if self.batch is None:
            return None
        batch = self.batch
        wish, keys = batch.wish, batch.keys
        misses = [wish.presence.get(key) for key in keys if key not in wish.pulled]
        if not all(isinstance(miss, PeerMiss) for miss in misses):
            assert wish.deadline_s is not None
            if not self.end or self._clock() < wish.deadline_s + LOAN_MARGIN_S:
                return None
        self.batch = None
        self._try_again(batch)
        arrived = [key for key in keys if key in wish.pulled]
        self.fetched += arrived
        failed = [miss for miss in misses if isinstance(miss, PeerMiss) and miss not in OF_ONE_CHUNK]
        self._missed += sum(miss is not PeerMiss.BUSY for miss in misses)
        if failed and not (arrived and set(failed) == {PeerMiss.BUSY}):
            self._failed(failed[0])
        else:
            self._failures = 0
        return batch

    def finish(self, end: str) -> None:
        """End the hand-over, unless it has ended already."""
        if not self.end:
            self.end = end
            self.queue.clear()

    def reset(self) -> None:
        """End the hand-over because of a reset, after which a batch under way has no outcome."""
        self.batch = None
        self.finish(PeerMiss.RESETS.value)

    def warmed(self) -> Warmed:
        """Return the state for the sender of the request."""
        fetched = len(self.fetched)
        return Warmed(
            self.number,
            str(self.end),
            self._offered,
            fetched,
            fetched * self._chunk_bytes,
            self._present,
            self._missed,
            self._evicted,
        )

    def _try_again(self, batch: Batch) -> None:
        """Put chunks that the source did not lend, because it lent too many, back into the queue."""
        presence = batch.wish.presence
        busy = [
            (key, at) for key, at in zip(batch.keys, batch.before, strict=True) if presence.get(key) is PeerMiss.BUSY
        ]
        if not busy:
            # The source may lend more by now.
            self.batch_chunks = min(2 * self.batch_chunks, self._max_batch_chunks)
        elif not self.end:
            self.queue.extendleft(reversed(busy))
            self.chunks_left += len(busy)
            # A source that lent nothing is given time, and then it may lend a whole batch.
            self.batch_chunks = len(batch.keys) - len(busy) or self.batch_chunks

    def _failed(self, miss: PeerMiss) -> None:
        self._failures += 1
        if miss not in PASSING or self._failures >= MAX_FAILURES:
            self.finish(miss.value)
        else:
            self._pause_until_s = self._clock() + self._timeout_s
