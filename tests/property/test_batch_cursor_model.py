# SPDX-License-Identifier: Apache-2.0
"""The batch cursor against a small world: a publisher that drops, doubles, skips and restarts, and a lossy replay.

Whatever happens: unless the consumer must start from nothing, the next batch is the next seq of the same life. No batch
comes twice. The number of held batches stays bounded. Once the world is quiet, the last batch has come.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.stream_items import (
    Batch,
    GapClosed,
    GapLost,
    GapOpened,
    Proven,
    Restarted,
    ResumePoint,
    RingReread,
    fingerprint,
)
from tests.support.examples import examples

RING = 6
MAX_HELD = 5


class Consumer:
    """A reader that applies the items as their documentation says, and fails when it would be misled."""

    def __init__(self, last: tuple[int, int] | None) -> None:
        # Life and seq of the last batch; None if the reader starts from nothing.
        self.last = last
        self.handed: set[tuple[int, int]] = set() if last is None else {last}
        self.gap: tuple[int, int] | None = None
        self.lost_next: int | None = None
        self.behind = False

    def read(self, item: object) -> None:
        match item:
            case Batch(seq, payload, print_):
                life, sent_seq = (int(part) for part in payload.split(b":"))
                assert sent_seq == seq
                assert print_ == fingerprint(payload)
                # After a loss the consumer begins from nothing. If an older batch is then the first to arrive, the one
                # after it belongs to it, although it was handed out before the loss.
                assert (life, seq) not in self.handed or self.last == (life, seq - 1), "twice"
                if self.last is not None:
                    assert (life, seq) == (self.last[0], self.last[1] + 1), "something is missing or out of order"
                if self.lost_next is not None:
                    assert seq == self.lost_next
                    self.lost_next = None
                self.last = (life, seq)
                self.handed.add((life, seq))
            case GapOpened(first, following):
                assert self.last is None or first == self.last[1] + 1
                assert first < following
                assert self.gap is None
                self.gap = (first, following)
            case GapClosed(first, following):
                assert self.gap == (first, following)
                assert self.last is not None
                assert all((self.last[0], seq) in self.handed for seq in range(first, following))
                self.gap = None
            case GapLost(first, following):
                assert first <= following
                self.last = self.gap = None
                # An empty range says only that continuity could not be proven.
                self.lost_next = following if first < following else None
            case Restarted() | RingReread():
                self.last = self.gap = self.lost_next = None
                self.handed.clear()
            case Proven(seq):
                assert self.last is not None
                assert seq == self.last[1]
            case FellBehind():
                assert not self.behind
                self.behind = True
            case CaughtUp():
                assert self.behind
                self.behind = False
            case _:
                pass


class World(RuleBasedStateMachine):
    """A publisher, the wires between it and a cursor, and the consumer of the cursor's items."""

    @initialize(
        replay=st.booleans(),
        before=st.integers(0, 9),
        resume=st.none() | st.integers(0, 8),
        resume_of_another_life=st.booleans(),
    )
    def begin(self, replay: bool, before: int, resume: int | None, resume_of_another_life: bool) -> None:
        self.replay = replay
        self.life = 1
        self.next_seq = 0
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=RING)
        self.live: deque[tuple[int, bytes]] = deque()
        self.sent: deque[tuple[int, bytes]] = deque(maxlen=4)
        self.answers: deque[tuple[int, bytes] | None] = deque()
        self.served = 0
        self.connection_due = True
        for _ in range(before):
            self._make()
        point = None
        last = None
        if resume is not None and (resume < before or replay):
            # A batch that the publisher never sent is of another life; without replay nothing could show that.
            life = 0 if replay and (resume_of_another_life or resume >= before) else 1
            last = (life, resume)
            point = ResumePoint(resume, fingerprint(b"%d:%d" % last))
        self.cursor = Cursor(replay=replay, resume=point, max_held=MAX_HELD)
        self.consumer = Consumer(last)

    def _make(self) -> tuple[int, bytes]:
        batch = (self.next_seq, b"%d:%d" % (self.life, self.next_seq))
        self.next_seq += 1
        self.ring.append(batch)
        return batch

    @rule(count=st.integers(1, 4), sent=st.booleans())
    def publish(self, count: int, sent: bool) -> None:
        for _ in range(count):
            batch = self._make()
            # A publisher without subscribers drops batches. Without replay the first batch of its life always arrives,
            # because nothing else shows a restart.
            if sent or (batch[0] == 0 and not self.replay):
                self.live.append(batch)
                self.sent.append(batch)

    @rule()
    def skip_seq(self) -> None:
        if self.next_seq:
            self.next_seq += 1

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def double(self, data: st.DataObject) -> None:
        self.live.append(data.draw(st.sampled_from(list(self.sent))))

    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            self.cursor.live(*self.live.popleft())

    @precondition(lambda self: self.connection_due)
    @rule()
    def connect(self) -> None:
        self.connection_due = False
        self.cursor.connected()

    @precondition(lambda self: not self.connection_due)
    @rule(restarts=st.booleans(), drained=st.booleans())
    def disconnect(self, restarts: bool, drained: bool) -> None:
        # A batch in flight is read or lost, but never arrives after the disconnect. Without replay a life's first batch
        # is never lost.
        if drained or (not self.replay and any(seq == 0 for seq, _ in self.live)):
            self.deliver(len(self.live))
        self.live.clear()
        self.sent.clear()
        self.answers.clear()
        self.cursor.disconnected()
        self.connection_due = True
        if restarts:
            self._restart()

    @precondition(lambda self: not self.live and self.cursor.request is None and not self.connection_due)
    @rule()
    def restart_behind_a_proxy(self) -> None:
        self.sent.clear()
        self._restart()
        self.publish(1, True)
        self.deliver(1)

    def _restart(self) -> None:
        self.life += 1
        self.next_seq = 0
        self.ring.clear()

    @precondition(lambda self: self.cursor.request is not None and self.cursor.request.number != self.served)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.integers(0, RING), max_size=2))
        self._serve(lost)

    def _serve(self, lost: set[int]) -> None:
        request = self.cursor.request
        assert request is not None
        self.served = request.number
        # The first answer travels alone and is never dropped. Later answers pile up behind it and can be lost, as can
        # the end marker.
        full: list[tuple[int, bytes] | None] = [batch for batch in self.ring if batch[0] >= request.start]
        full = [batch for place, batch in enumerate(full) if place == 0 or place not in lost]
        self.answers = deque([*full, *([] if RING in lost else [None])])

    @rule(count=st.integers(1, 9))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.answers))):
            request = self.cursor.request
            if request is None or request.number != self.served:
                self.answers.clear()
                return
            batch = self.answers.popleft()
            if batch is None:
                self.cursor.replay_ended()
            else:
                self.cursor.replayed(*batch)

    @precondition(lambda self: self.cursor.request is not None)
    @rule()
    def overdue(self) -> None:
        self.cursor.replay_overdue()

    @rule()
    def check(self) -> None:
        self.cursor.check()

    @invariant()
    def consumer_is_never_misled(self) -> None:
        if not hasattr(self, "cursor"):
            return
        for item in self.cursor.take():
            self.consumer.read(item)
        assert self.cursor.held <= MAX_HELD
        assert self.replay or self.cursor.request is None
        request = self.cursor.request
        if self.cursor.held or (request is not None and (not request.silent or request.batches)):
            assert self.consumer.behind, "more is to come, and nothing says so"
        elif not self.connection_due and request is None:
            assert not self.consumer.behind, "nothing is under way, and nothing says so"

    def teardown(self) -> None:
        if not hasattr(self, "cursor"):
            return
        if self.connection_due:
            self.connect()
        self._settle()
        if not self.replay:
            return
        self.cursor.check()
        self._settle()
        if self.ring:
            last_seq = self.ring[-1][0]
            assert self.consumer.last == (self.life, last_seq), "the tail is missing after a check"
            assert self.consumer.gap is None

    def _settle(self) -> None:
        for _ in range(200):
            self.deliver(len(self.live))
            request = self.cursor.request
            if request is not None:
                self._serve(set())
                self.answer(RING + 1)
            elif not self.live:
                break
        self.consumer_is_never_misled()
        assert self.cursor.request is None, "replay requested for ever"
        assert self.cursor.held == 0


TestCursor = World.TestCase
TestCursor.settings = settings(max_examples=examples(500), stateful_step_count=40)
