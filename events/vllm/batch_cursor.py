# SPDX-License-Identifier: Apache-2.0
"""Every decision about the order of a publisher's batches: what is next, missing, doubled, or of another life. Pure.

The wire has a seq and no epoch. A life of the publisher is told apart by going on from a batch that we know: same seq,
same fingerprint. So each replay request starts at the last batch handed out, inclusive; only with nothing known at 0.

The shell feeds messages and connection changes in, takes `items` out, and keeps exactly the replay request that
`request` names in flight. While one is, live batches are held (bounded; an overflow is a gap again). There is no I/O
and no clock here; the shell says when an answer is overdue.
"""

from __future__ import annotations

from array import array
from collections import deque

import msgspec

from kvrouter.events.vllm.replay_request import Purpose, Request
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapClosed,
    GapLost,
    GapOpened,
    Incomplete,
    Malformed,
    Proven,
    ReadAnew,
    ReplayFailed,
    ReplayFinished,
    Restarted,
    ResumePoint,
    StreamItem,
    fingerprint,
)

__all__ = [
    "Batch",
    "Connected",
    "Cursor",
    "Disconnected",
    "GapClosed",
    "GapLost",
    "GapOpened",
    "Incomplete",
    "Malformed",
    "Proven",
    "ReadAnew",
    "ReplayFailed",
    "ReplayFinished",
    "Request",
    "Restarted",
    "ResumePoint",
    "StreamItem",
    "fingerprint",
]

# Twice vLLM's default ring (buffer_steps 10,000): what arrives while a whole ring is replayed.
DEFAULT_MAX_HELD = 20_000

# A batch of a long prefill is some 100 KB; this bounds what a flood can cost during one replay.
DEFAULT_MAX_HELD_BYTES = 256 << 20

# Batches handed out whose fingerprints are kept, to tell a duplicate from another life.
REMEMBERED_BATCHES = 4096

# Answered requests between two times that all is read anew: an endpoint that answers little and never all must not void
# the index at every check.
ANSWERS_BETWEEN_READINGS = 3


class Cursor:
    """Where we are in one publisher's stream. Single-threaded; never raises on what the wire brings."""

    def __init__(
        self,
        *,
        replay: bool,
        resume: ResumePoint | None = None,
        max_held: int = DEFAULT_MAX_HELD,
        max_held_bytes: int = DEFAULT_MAX_HELD_BYTES,
    ) -> None:
        """replay: there is an endpoint to ask. max_held, max_held_bytes: bounds on live batches held meanwhile."""
        self.items: list[StreamItem] = []
        self.request: Request | None = None
        self._replay = replay
        self._replay_works = replay
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._connected = False
        # The next message or connection must first be proven to be of the life that we know.
        self._to_prove = True
        self._expected: int | None = None
        self._last_seq: int | None = None
        self._seen_seqs = array("q", [-1]) * REMEMBERED_BATCHES
        self._seen_prints = array("Q", [0]) * REMEMBERED_BATCHES
        self._held: deque[tuple[int, bytes, int]] = deque()
        self._held_bytes = 0
        # Held batches were dropped since the last drain.
        self._overflowed = False
        # How many of the held came over a connection that is gone, or before a whole replay was asked for.
        self._held_old = 0
        self._gap: tuple[int, int] | None = None
        self._requests = 0
        # What came before was given up because the replay endpoint did not answer; all is read anew when it does.
        self._owed = False
        self._answers_to_wait = 0
        if resume is not None:
            self._expected = resume.seq + 1
            self._remember(resume.seq, resume.fingerprint)
            self._owed = replay and resume.incomplete

    @property
    def held(self) -> int:
        """Live batches that wait for a replay."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Payload bytes of those."""
        return self._held_bytes

    @property
    def degraded(self) -> bool:
        """There is a replay endpoint, and it does not answer, or has not brought yet what was given up meanwhile."""
        return self._replay and (not self._replay_works or self._owed)

    def take(self) -> list[StreamItem]:
        """The items since the last call, in order."""
        items, self.items = self.items, []
        return items

    def connected(self) -> None:
        """The live socket has a peer."""
        self._connected = True
        self._replay_works = self._replay
        if self._to_prove and self._replay:
            self._begin_proof()
        self.items.append(Connected(replaying=self._holding()))

    def disconnected(self) -> None:
        """The live socket lost its peer: what comes next may be of another life."""
        if not self._connected:
            return
        self._connected = False
        self.items.append(Disconnected())
        self.request = None
        self._to_prove = True
        self._replay_works = self._replay
        self._answers_to_wait = 0
        self._held_old = len(self._held)

    def live(self, seq: int, payload: bytes) -> None:
        """A batch from the live socket; 0 <= seq < 2**63."""
        if self._to_prove and self._replay and self._replay_works:
            # It overtook the news of the connection.
            self._begin_proof()
        print_ = fingerprint(payload)
        if self._holding():
            self._hold(seq, payload, print_)
        elif not self._accept(seq, payload, print_):
            self._hold_first(seq, payload, print_)

    def replayed(self, seq: int, payload: bytes) -> None:
        """A batch from the replay socket."""
        request = self.request
        if request is None or seq < request.start:
            return
        self._replay_works = True
        if self._pay(request):
            return
        print_ = fingerprint(payload)
        if not request.judged:
            request.judged = True
            if not self._judge_first(request, seq, print_):
                return
        expected = self._expected
        if expected is None:
            if not self._seen(seq, print_):
                self._hand_replayed(request, seq, payload, print_)
        elif seq == expected:
            self._hand_replayed(request, seq, payload, print_)
        elif seq > expected:
            if request.again_at == expected:
                self._lose(expected, seq, "the publisher no longer has these batches")
                self._hand_replayed(request, seq, payload, print_)
            else:
                self._ask_again(request)
        elif not self._seen(seq, print_) and seq > expected - REMEMBERED_BATCHES:
            if request.purpose is Purpose.START:
                self.replay_failed(f"replayed batch {seq} contradicts one handed out before")
            else:
                self._restart(seq, f"replay has another batch {seq} than the one handed out")

    def replay_ended(self) -> None:
        """The replay socket sent the end marker."""
        request = self.request
        if request is None:
            return
        self._replay_works = True
        if self._pay(request):
            return
        if not request.judged and request.purpose is Purpose.PROVE:
            self._restart(0, f"the publisher has nothing from seq {request.start} on")
            return
        if self._expected is None:
            # It has sent nothing yet in this life.
            self._expected = 0
        if self._gap is not None:
            if request.again_at != self._expected:
                self._ask_again(request)
                return
            self._lose_gap("the publisher no longer has these batches")
        self.request = None
        if request.announced or request.batches:
            self.items.append(ReplayFinished(request.first_seq, request.last_seq, request.batches))
        self._drain()

    def replay_overdue(self) -> None:
        """Nothing came from the replay socket for too long."""
        request = self.request
        if request is None:
            return
        if request.progress:
            self._ask_again(request)
        else:
            self.replay_failed("no answer from the replay endpoint")

    def replay_failed(self, reason: str) -> None:
        """The replay cannot go on: judge by the live stream alone."""
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
        self._owe()
        self._held_old = 0
        self._drain()

    def check(self) -> None:
        """Asks, without holding anything back, whether batches at the end of the stream went missing.

        A publisher that falls silent says nothing of what PUB dropped last, nor of its restart behind a proxy.
        """
        if self._replay and self._connected and self.request is None:
            self._begin(Purpose.START if self._last_seq is None else Purpose.PROVE, silent=True)

    def expire(self, reason: str) -> None:
        """Known from elsewhere: what was handed out may be of a life that has ended. All is replayed, where that can
        be."""
        # Where nobody is there to be asked, the next connection is.
        self._restart(self._expected or 0, reason, ask=self._connected)
        self._to_prove = not self._connected

    def malformed(self, reason: str) -> None:
        """A message that is no batch."""
        self.items.append(Malformed(reason))

    def _holding(self) -> bool:
        request = self.request
        return request is not None and not (request.silent and request.purpose is Purpose.PROVE)

    def _begin_proof(self) -> None:
        self._to_prove = False
        self._begin(Purpose.START if self._last_seq is None else Purpose.PROVE)

    def _begin(self, purpose: Purpose, *, silent: bool = False) -> None:
        if purpose is Purpose.START:
            self._drop_old()
            self._held_old = len(self._held)
        self._requests += 1
        self.request = Request(
            self._requests,
            self._first_wanted(),
            purpose,
            silent,
            announced=not silent or not self._replay_works,
            judged=self._last_seq is None,
        )

    def _ask_again(self, request: Request) -> None:
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
        if self._last_seq is not None:
            return self._last_seq
        return self._expected or 0

    def _judge_first(self, request: Request, seq: int, print_: int) -> bool:
        """Compares an answer's first batch with the last one handed out; False when `seq` needs nothing more."""
        if seq == request.start:
            if not self._seen(seq, print_):
                self._restart(seq, f"seq {seq} is another batch than the one handed out")
            elif self._to_prove or (request.purpose is Purpose.PROVE and not request.silent):
                self._to_prove = False
                self.items.append(Proven(seq, "replay"))
            return False
        expected = self._expected
        if expected is None or seq < expected:
            return True
        # Without the batch that we know there is no proof of the same life, whatever seq comes; nor is there of what is
        # held from the connection before.
        self._drop_old()
        self._lose(expected, seq, f"the replay begins at seq {seq}, after what was known")
        return True

    def _accept(self, seq: int, payload: bytes, print_: int) -> bool:
        """Judges a live batch; False when it must be held because a replay has to come first."""
        expected = self._expected
        if expected is None and self._seen(seq, print_):
            return True
        if expected is None or seq == expected:
            if self._to_prove and self._last_seq is not None:
                if self._replay:
                    # Another life can reach the next seq by chance, and what could tell did not answer in time.
                    self._lose(seq, seq, "the replay endpoint did not prove that it is the same life")
                    self._owe()
                else:
                    self.items.append(Proven(self._last_seq, "next_seq"))
            self._hand(seq, payload, print_, replayed=False)
            return True
        if seq > expected:
            if self._replay_works:
                self._gap = (expected, seq)
                self.items.append(GapOpened(expected, seq))
                self._begin(Purpose.FILL)
                return False
            self._lose(expected, seq, "no replay to ask")
            self._owe()
            self._hand(seq, payload, print_, replayed=False)
            return True
        if self._seen(seq, print_):
            return True
        self._restart(seq, f"seq fell back from {expected - 1} to {seq}")
        if self.request is not None:
            return False
        self._hand(seq, payload, print_, replayed=False)
        return True

    def _hand(self, seq: int, payload: bytes, print_: int, *, replayed: bool) -> None:
        self.items.append(Batch(seq, payload, print_, replayed))
        self._expected = seq + 1
        self._to_prove = False
        self._remember(seq, print_)
        gap = self._gap
        if gap is not None and seq + 1 >= gap[1]:
            self._gap = None
            self.items.append(GapClosed(gap[0], gap[1]))

    def _hand_replayed(self, request: Request, seq: int, payload: bytes, print_: int) -> None:
        self._hand(seq, payload, print_, replayed=True)
        request.batches += 1
        request.progress += 1
        request.last_seq = seq
        if request.first_seq is None:
            request.first_seq = seq

    def _lose(self, first_seq: int, next_seq: int, reason: str) -> None:
        """Gives a range up. The consumer starts from nothing, so any seq may come next."""
        self.items.append(GapLost(first_seq, next_seq, reason))
        self._gap = None
        self._expected = None
        self._last_seq = None
        self._to_prove = False

    def _owe(self) -> None:
        """Where nothing is known now, the replay endpoint's silence is why."""
        if self._replay and self._last_seq is None:
            self._owed = True
            self.items.append(Incomplete())

    def _pay(self, request: Request) -> bool:
        """The replay endpoint answers. Whether what was given up is asked for now, in place of `request`."""
        if request.purpose is Purpose.START:
            self._owed = False
        if not self._owed or request.paid:
            return False
        request.paid = True
        if self._answers_to_wait:
            self._answers_to_wait -= 1
            return False
        self._answers_to_wait = ANSWERS_BETWEEN_READINGS
        self.items.append(ReadAnew())
        self._begin_anew()
        return True

    def _lose_gap(self, reason: str) -> None:
        if self._gap is None or self._expected is None:
            return
        if self._held and self._held[0][0] < self._expected and not self._seen(self._held[0][0], self._held[0][2]):
            # Another life's, which voids more than a gap.
            return
        # An overflow may have dropped what the gap was seen by.
        following = next((seq for seq, _, _ in self._held if seq >= self._gap[1]), self._gap[1])
        self._lose(self._expected, following, reason)

    def _lose_unless_contradicted(self, reason: str) -> None:
        """No proof, and not all is left of what came since: then the next seq alone is no proof either."""
        expected = self._expected
        if expected is None or not (self._overflowed or self._held_old):
            return
        self._drop_old()
        following = self._held[0][0] if self._held else expected
        if following >= expected:
            self._lose(expected, following, reason)

    def _restart(self, seq: int, reason: str, *, ask: bool = True) -> None:
        last_seq = -1 if self._expected is None else self._expected - 1
        replaying = ask and self._replay_works
        self.items.append(Restarted(last_seq, seq, reason, replaying))
        if replaying:
            # Of what is held, the new life's part comes again with its replay; the old life's must not pass for it.
            self._begin_anew()
        else:
            self._forget()
            self._owe()

    def _forget(self) -> None:
        self._gap = None
        self._expected = None
        self._last_seq = None
        self._to_prove = False
        self._seen_seqs = array("q", [-1]) * REMEMBERED_BATCHES
        self._drop_old()
        self.request = None

    def _begin_anew(self) -> None:
        """Replay all that there is; what is held comes again with it."""
        self._forget()
        self._held.clear()
        self._held_bytes = 0
        self._owed = False
        self._begin(Purpose.START)

    def _remember(self, seq: int, print_: int) -> None:
        self._last_seq = seq
        slot = seq % REMEMBERED_BATCHES
        self._seen_seqs[slot] = seq
        self._seen_prints[slot] = print_

    def _seen(self, seq: int, print_: int) -> bool:
        slot = seq % REMEMBERED_BATCHES
        return self._seen_seqs[slot] == seq and self._seen_prints[slot] == print_

    def _hold(self, seq: int, payload: bytes, print_: int) -> None:
        self._held.append((seq, payload, print_))
        self._held_bytes += len(payload)
        while len(self._held) > 1 and (len(self._held) > self._max_held or self._held_bytes > self._max_held_bytes):
            self._pop_held()
            self._overflowed = True

    def _pop_held(self) -> tuple[int, bytes, int]:
        oldest = self._held.popleft()
        self._held_bytes -= len(oldest[1])
        self._held_old = max(0, self._held_old - 1)
        return oldest

    def _drop_old(self) -> None:
        while self._held_old:
            self._pop_held()

    def _drain(self) -> None:
        old, self._held_old = self._held_old, 0
        self._overflowed = False
        while self._held and not self._holding():
            seq, payload, print_ = self._pop_held()
            # What came before a whole replay was asked for, and is not in it, is older than all that the publisher has.
            outdated = old > 0 and self._expected is not None and seq < self._expected
            old -= 1
            if not outdated and not self._accept(seq, payload, print_):
                self._hold_first(seq, payload, print_)

    def _hold_first(self, seq: int, payload: bytes, print_: int) -> None:
        """Holds what a request was just begun for, ahead of the rest."""
        self._held.appendleft((seq, payload, print_))
        self._held_bytes += len(payload)
        if self.request is not None and self.request.purpose is Purpose.START:
            self._held_old += 1
