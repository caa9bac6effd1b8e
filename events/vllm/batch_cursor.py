# SPDX-License-Identifier: Apache-2.0
"""The order of a publisher's batches: which one is next, missing, duplicate, or of another life. Pure.

A life of the publisher is the time from one start to its end. The wire has a seq and no epoch, so a life is recognised
by a known batch: same seq, same fingerprint. Therefore each replay request starts at the last batch that was passed on,
or at 0 if no batch is known.

The shell feeds in messages and connection changes, takes `items` out, and keeps exactly the replay request in `request`
under way. Meanwhile live batches are held (bounded; an overflow is another gap). The shell decides when an answer is
overdue.

Invariant: between `FellBehind` and `CaughtUp`, the publisher has sent more than was handed out, or must be assumed to
have: a replay is under way, or batches are held until one ends. `FellBehind` comes before the first item of a replay,
and `CaughtUp` after the last held batch.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from kvrouter.events.transport.holding_cursor import HoldingCursor
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.transport.settings import DEFAULT_MAX_HELD_BYTES
from kvrouter.events.vllm.held_batches import DEFAULT_MAX_HELD, HeldBatches
from kvrouter.events.vllm.replay_request import Purpose, ReplayDebt, Request
from kvrouter.events.vllm.seen_batches import REMEMBERED_BATCHES, SeenBatches
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    Flooded,
    GapClosed,
    GapLost,
    GapOpened,
    Incomplete,
    Malformed,
    Proven,
    ReplayFailed,
    Restarted,
    ResumePoint,
    RingReread,
    StreamItem,
    fingerprint,
)


class Finding(Enum):
    """A sign in a replay that the connection of the live socket may not lead to the publisher that answers replays."""

    # The answer to a check had batches, or showed that some are lost.
    BATCHES = auto()
    # The publisher is in another life, although the replay that proved this connection was of the known one, or none came.
    SUCCESSOR = auto()


class Cursor(HoldingCursor[StreamItem, HeldBatches]):
    """The position in one publisher's stream. Single-threaded; never raises, whatever the wire brings."""

    def __init__(
        self,
        *,
        replay: bool,
        resume: ResumePoint | None = None,
        max_held: int = DEFAULT_MAX_HELD,
        max_held_bytes: int = DEFAULT_MAX_HELD_BYTES,
    ) -> None:
        """Begin at the resume point, or without a known batch.

        Args:
            replay: Whether there is a replay endpoint.
            resume: The last batch that was passed on before.
            max_held: Bound on the live batches that are held during a replay.
            max_held_bytes: Bound on their bytes.
        """
        super().__init__(HeldBatches(max_held, max_held_bytes))
        self.request: Request | None = None
        self._replay = replay
        self._replay_works = replay
        self._connected = False
        # Whether the next message or connection must first be proven to belong to the known life.
        self._to_prove = True
        self._expected: int | None = None
        self._last_seq: int | None = None
        self._seen = SeenBatches()
        self._gap: tuple[int, int] | None = None
        self._requests = 0
        # Whether `FellBehind` was announced and `CaughtUp` was not.
        self._behind = False
        self._debt = ReplayDebt(owed=replay and resume is not None and resume.incomplete)
        self._finding: Finding | None = None
        if resume is not None:
            self._expected = resume.seq + 1
            self._last_seq = resume.seq
            self._seen.add(resume)

    @property
    def degraded(self) -> bool:
        """Whether the replay endpoint does not answer, or still owes batches that were given up meanwhile."""
        return self._replay and (not self._replay_works or self._debt.owed)

    def take_finding(self) -> Finding | None:
        """Return what replays have shown since the last call that the live socket had not, batches once all are there."""
        if self._finding is Finding.BATCHES and self.request is not None:
            return None
        finding, self._finding = self._finding, None
        return finding

    def connected(self) -> None:
        """Note that the live socket has a peer."""
        self._connected = True
        self._replay_works = self._replay
        if self._to_prove and self._replay:
            self._begin_proof()
        self.items.append(Connected())

    def disconnected(self) -> None:
        """Note that the live socket lost its peer: the next batch may belong to another life."""
        if not self._connected:
            return
        self._connected = False
        self.items.append(Disconnected())
        self.request = self._finding = None
        self._to_prove = True
        self._replay_works = self._replay
        self._debt.stop_waiting()
        self._held.mark_old()

    def live(self, seq: int, payload: bytes) -> None:
        """Handle a batch from the live socket; 0 <= seq < 2**63."""
        if seq == self._expected and self.request is None and not (self._to_prove or self._behind or self._gap):
            # Nearly every batch is the next one of a stream in order.
            self._hand(Batch(seq, payload, fingerprint(payload), replayed=False))
            return
        if self._to_prove and self._replay and self._replay_works:
            # The batch arrived before the news of its connection.
            self._begin_proof()
        batch = Batch(seq, payload, fingerprint(payload), replayed=False)
        if self._holding():
            self._fall_behind()
            self._held.hold(batch)
        elif not self._accept(batch):
            self._hold_first(batch)
        self._catch_up()

    def replayed(self, seq: int, payload: bytes) -> None:
        """Handle a batch from the replay socket."""
        request = self.request
        if request is None or seq < request.start:
            return
        self._replay_works = True
        if self._pay(request):
            return
        batch = Batch(seq, payload, fingerprint(payload), replayed=True)
        if not request.judged:
            request.judged = True
            if not self._judge_first(request, batch):
                return
        expected = self._expected
        if expected is None:
            if not self._seen.has(batch):
                self._hand_replayed(request, batch)
        elif seq == expected:
            self._hand_replayed(request, batch)
        elif seq > expected:
            if request.again_at == expected:
                self._lose(expected, seq, "the publisher no longer has these batches")
                self._hand_replayed(request, batch)
            else:
                self._request_rest(request)
        elif not self._seen.has(batch) and seq > expected - REMEMBERED_BATCHES:
            if request.purpose is Purpose.START:
                self.replay_failed(f"replayed batch {seq} contradicts one handed out before")
            else:
                self._succeed(request, seq, f"replay has another batch {seq} than the one handed out")

    def replay_ended(self) -> None:
        """Handle the end marker of the replay socket."""
        request = self.request
        if request is None:
            return
        self._replay_works = True
        if self._pay(request):
            return
        if not request.judged and request.purpose is Purpose.PROVE:
            self._succeed(request, 0, f"the publisher has nothing from seq {request.start} on")
            return
        if self._expected is None:
            # The publisher has sent no batch in this life yet.
            self._expected = 0
        if self._gap is not None:
            if request.again_at != self._expected:
                self._request_rest(request)
                return
            self._lose_gap("the publisher no longer has these batches")
        self.request = None
        self._drain()
        self._catch_up()

    def replay_overdue(self) -> None:
        """Handle a replay that made no progress for too long."""
        request = self.request
        if request is None:
            return
        if request.progress:
            self._request_rest(request)
        else:
            self.replay_failed("no answer from the replay endpoint")

    def replay_failed(self, reason: str) -> None:
        """End a replay that cannot continue: the live stream alone decides."""
        request = self.request
        if request is None:
            return
        self.request = None
        if self._replay_works or not request.silent:
            self.items.append(ReplayFailed(reason))
        self._replay_works = False
        if request.purpose is Purpose.PROVE and not request.judged and not request.silent:
            self._to_prove = True
            self._lose_unless_contradicted(reason)
        self._lose_gap(reason)
        self._lose_cut_answer(request, reason)
        self._owe()
        self._held.old = 0
        self._drain()
        self._catch_up()

    def check(self) -> None:
        """Request the batches that may be missing at the end of the stream, without holding live batches.

        A silent publisher reveals neither the last batches that PUB dropped nor a restart behind a proxy.
        """
        if self._replay and self._connected and self.request is None:
            self._begin(Purpose.START if self._last_seq is None else Purpose.PROVE, silent=True)

    def expire(self, reason: str) -> None:
        """Assume that the known life has ended, as another source reports. Everything is replayed if possible."""
        # Without a peer, the next connection begins the replay.
        self._restart(self._expected or 0, reason, ask=self._connected)
        if self.request is None:
            # No replay will follow by which the held batches could be judged.
            self._held.clear()
        self._to_prove = not self._connected
        self._catch_up()

    def malformed(self, reason: str) -> None:
        """Report a message that is no batch."""
        self.items.append(Malformed(reason))

    def flooded(self, reason: str, *, is_live: bool) -> None:
        """Report that a connection was closed because of the bytes that it brought.

        `is_live` says whether it was the connection of the stream itself.
        """
        self.items.append(Flooded(reason, is_live))

    def _holding(self) -> bool:
        request = self.request
        return request is not None and not (request.silent and request.purpose is Purpose.PROVE)

    def _fall_behind(self, *, missing: bool = False) -> None:
        """Announce, once, that the publisher has sent more than was handed out."""
        if not self._behind:
            self._behind = True
            self.items.append(FellBehind(missing))

    def _catch_up(self) -> None:
        """Announce `CaughtUp` if no replay is under way and nothing is held or unread."""
        if self._behind and self.request is None and not self._held and not self._unread:
            self._behind = False
            self.items.append(CaughtUp())

    def _begin_proof(self) -> None:
        self._to_prove = False
        self._begin(Purpose.START if self._last_seq is None else Purpose.PROVE)

    def _begin(self, purpose: Purpose, *, silent: bool = False) -> None:
        if purpose is Purpose.START:
            self._held.drop_old()
            self._held.mark_old()
        if not silent:
            self._fall_behind()
        self._requests += 1
        self.request = Request(self._requests, self._first_wanted(), purpose, silent, judged=self._last_seq is None)

    def _request_rest(self, request: Request) -> None:
        self._fall_behind(missing=True)
        self._requests += 1
        self.request = msgspec.structs.replace(
            request,
            number=self._requests,
            start=self._first_wanted(),
            purpose=Purpose.FILL,
            again_at=self._expected,
            judged=self._last_seq is None,
            progress=0,
        )

    def _first_wanted(self) -> int:
        return self._last_seq if self._last_seq is not None else self._expected or 0

    def _judge_first(self, request: Request, batch: Batch) -> bool:
        """Compare an answer's first batch with the last one passed on. Returns False if `batch` needs nothing more."""
        seq = batch.seq
        if seq == request.start:
            if not self._seen.has(batch):
                self._succeed(request, seq, f"seq {seq} is another batch than the one handed out")
            elif self._to_prove or (request.purpose is Purpose.PROVE and not request.silent):
                self._to_prove = False
                self._fall_behind()
                self.items.append(Proven(seq, "replay"))
            return False
        expected = self._expected
        if expected is None or seq < expected:
            return True
        # Without the known batch nothing proves the same life, neither for the answer nor for batches held from the
        # connection before.
        self._held.drop_old()
        self._fall_behind()
        self._miss(request)
        self._lose(expected, seq, f"the replay begins at seq {seq}, after what was known")
        return True

    def _accept(self, batch: Batch) -> bool:
        """Judge a live batch. Returns False if it must be held until a replay ends."""
        seq, expected = batch.seq, self._expected
        if expected is None and self._seen.has(batch):
            return True
        if expected is None or seq == expected:
            if self._to_prove and self._last_seq is not None:
                if self._replay:
                    # Another life can reach the next seq accidentally, and no replay proved this one in time.
                    self._lose(seq, seq, "the replay endpoint did not prove that it is the same life")
                    self._owe()
                else:
                    self.items.append(Proven(self._last_seq, "next_seq"))
            self._hand(batch)
            return True
        if seq > expected:
            if self._replay_works:
                self._gap = (expected, seq)
                self.items.append(GapOpened(expected, seq))
                self._begin(Purpose.FILL)
                return False
            self._lose(expected, seq, "no replay to ask")
            self._owe()
            self._hand(batch)
            return True
        if self._seen.has(batch):
            return True
        self._restart(seq, f"seq fell back from {expected - 1} to {seq}")
        if self.request is not None:
            return False
        self._hand(batch)
        return True

    def _hand(self, batch: Batch) -> None:
        self.items.append(batch)
        seq = self._last_seq = batch.seq
        self._expected = seq + 1
        self._to_prove = False
        self._seen.add(batch)
        gap = self._gap
        if gap is not None and seq + 1 >= gap[1]:
            self._gap = None
            self.items.append(GapClosed(gap[0], gap[1]))

    def _hand_replayed(self, request: Request, batch: Batch) -> None:
        # Every request but a check was announced before. A check's batch may be one that the live socket brings a
        # moment later, so it shows that more was sent, but not that anything is lost.
        self._fall_behind()
        self._miss(request)
        self._hand(batch)
        request.batches += 1
        request.progress += 1

    def _lose(self, first_seq: int, next_seq: int, reason: str) -> None:
        """Give up a range. The consumer starts again from nothing, so any seq may be next."""
        self.items.append(GapLost(first_seq, next_seq, reason))
        self._forget_position()

    def _owe(self) -> None:
        """Record a debt if the replay endpoint's silence left no batch known."""
        if self._replay and self._last_seq is None:
            self._debt.owed = True
            self.items.append(Incomplete())

    def _pay(self, request: Request) -> bool:
        """Note that the replay endpoint answers. Returns whether the whole ring is now requested instead."""
        due = self._debt.is_due(request)
        if due:
            self._fall_behind()
            self.items.append(RingReread())
            self._request_ring()
        return due

    def _lose_gap(self, reason: str) -> None:
        if self._gap is None or self._expected is None:
            return
        first = self._held.first()
        if first is not None and first.seq < self._expected and not self._seen.has(first):
            # The batch belongs to another life, which voids more than a gap.
            return
        # An overflow may have dropped the batch that revealed the gap.
        following = next((seq for seq, _, _ in self._held if seq >= self._gap[1]), self._gap[1])
        self._lose(self._expected, following, reason)

    def _lose_cut_answer(self, request: Request, reason: str) -> None:
        """Give up the position after an answer that ended early.

        The publisher may have sent more, and no batch held over this connection shows its seq.
        """
        shown = request.batches or (request.judged and request.purpose is Purpose.PROVE and not request.silent)
        if shown and len(self._held) == self._held.old and self._expected is not None:
            self._held.drop_old()
            self._lose(self._expected, self._expected, f"the replay stopped before its end: {reason}")

    def _lose_unless_contradicted(self, reason: str) -> None:
        """Give up the position if the known life stays unproven and the next seq cannot decide.

        It cannot if held batches were dropped or are old. Even then the position is kept if the first held batch
        that is not old has a seq below the expected one, because that batch contradicts the known life.
        """
        expected = self._expected
        if expected is None or not (self._held.overflowed or self._held.old):
            return
        self._held.drop_old()
        first = self._held.first()
        following = expected if first is None else first.seq
        if following >= expected:
            self._lose(expected, following, reason)

    def _miss(self, request: Request) -> None:
        """Note that an answer has what the live socket did not bring, if it is the answer to a check."""
        if request.silent and self._finding is None:
            self._finding = Finding.BATCHES

    def _succeed(self, request: Request, seq: int, reason: str) -> None:
        """Begin another life, which the answer to `request` shows."""
        if request.silent or request.purpose is not Purpose.PROVE:
            # The answer to the proof of a new connection shows the life to which that connection leads.
            self._finding = Finding.SUCCESSOR
        self._restart(seq, reason)

    def _restart(self, seq: int, reason: str, *, ask: bool = True) -> None:
        last_seq = -1 if self._expected is None else self._expected - 1
        replaying = ask and self._replay_works
        if replaying:
            self._fall_behind()
        self.items.append(Restarted(last_seq, seq, reason))
        if replaying:
            # The replay repeats the held batches of the new life; those of the old life must not pass for new ones.
            self._request_ring()
        else:
            self._forget()
            self._owe()

    def _forget_position(self) -> None:
        self._gap = None
        self._expected = None
        self._last_seq = None
        self._to_prove = False

    def _forget(self) -> None:
        self._forget_position()
        self._seen = SeenBatches()
        self._held.drop_old()
        self.request = None

    def _request_ring(self) -> None:
        """Request the whole ring, which repeats the held batches."""
        self._forget()
        self._held.clear()
        self._debt.owed = False
        self._begin(Purpose.START)

    def _drain(self) -> None:
        held = self._held
        old, held.old, held.overflowed = held.old, 0, False
        while held and not self._holding():
            seq, batch, _ = held.pop()
            # An old batch (`HeldBatches.old`) before the expected seq was repeated by the replay, or is older than the
            # publisher's ring. It must not pass for the first batch of another life.
            outdated = old > 0 and self._expected is not None and seq < self._expected
            old -= 1
            if not outdated and not self._accept(batch):
                self._hold_first(batch)

    def _hold_first(self, batch: Batch) -> None:
        """Hold the batch for which a request was just begun, ahead of the others."""
        self._held.hold_first(batch, old=self.request is not None and self.request.purpose is Purpose.START)
