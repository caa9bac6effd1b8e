# SPDX-License-Identifier: Apache-2.0
"""The report cursor against a small world: a publisher that drops, restarts and answers late, over faulty wires.

The wires lose messages and deliver them out of order. Whatever happens: a reader that applies the items has exactly the
publisher's ledger of the moment before the next message, or knows that it has lost track. A heartbeat is handed out
only where it sums up that state. The number of held messages stays bounded. Once the world is quiet, the reader has the
current ledger.
"""

from __future__ import annotations

import copy
from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.items import (
    Declared,
    Expired,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    ReportResume,
    SnapshotFailed,
)
from kvrouter.events.patch.messages import (
    CatalogMessage,
    DeclaredCatalog,
    Events,
    Heartbeat,
    Hello,
    ReportCleared,
    ReportEvent,
    SnapshotPart,
)
from tests.support.examples import examples
from tests.support.fake_reporter import Ledger, apply, parts, removed, stored, summary

MAX_HELD = 4
MAX_HELD_BYTES = 60
HASHES = st.lists(st.integers(1, 6), min_size=1, max_size=3)
MEDIA = st.sampled_from(["GPU", "CPU"])


class Reader:
    """A reader that applies the items as their documentation says, and fails when it would be misled."""

    def __init__(self, ledgers: dict[tuple[str, int], Ledger], kept: tuple[str, int] | None) -> None:
        self.ledgers = ledgers
        # Epoch and next seq; None while the reader knows that it has lost track.
        self.at = kept
        self.ledger: Ledger = copy.deepcopy(ledgers[kept]) if kept else {}
        self.epoch = kept[0] if kept else None
        self.silent = False
        self.declared: tuple[str | None, int] = (None, 0)
        # The epoch of the last hello.
        self.greeted: str | None = None

    def read(self, item: object) -> None:
        match item:
            case ReportBatch(seq, message, size_bytes):
                assert self.at == (message.epoch, seq), "not the next message of what is known"
                assert size_bytes == 10 + seq
                apply(self.ledger, message.events)
                self.at = (message.epoch, seq + 1)
                self._is_exact()
            case Loaded(snapshot):
                if self.epoch is not None:
                    assert snapshot.epoch == self.epoch, "an unannounced new life"
                assert snapshot.epoch == self.greeted, "blocks without their groups"
                self.epoch = snapshot.epoch
                self.ledger = {}
                for place in snapshot.places:
                    held = Counter(place.hashes.tolist())
                    assert max(held.values()) == 1
                    held.update({block_hash: count - 1 for block_hash, count in place.copied})
                    assert (place.group_idx, place.medium) not in self.ledger
                    self.ledger[place.group_idx, place.medium] = held
                self.at = (snapshot.epoch, snapshot.next_seq)
                self._is_exact()
            case HeartbeatSeen(next_seq, message):
                assert self.at == (message.epoch, next_seq)
                assert _by_place(message.places) == _by_place(summary(self.ledger))
            case ReportGap(first, following, dropped):
                assert self.at is not None, "reported twice"
                assert first <= following
                assert first == self.at[1] or first == following
                assert dropped <= following - first
                self.at = None
            case Expired():
                self.at = None
                self.declared = (None, 0)
                self.greeted = None
            case Greeted(hello):
                self.greeted = hello.epoch
            case NewEpoch(epoch):
                assert epoch != self.epoch
                self.epoch = epoch
                self.at = None
            case Declared(version):
                if self.declared[0] == self.epoch:
                    assert version > self.declared[1]
                self.declared = (self.epoch, version)
            case PatchSilent():
                assert not self.silent
                self.silent = True
            case PatchHeard():
                assert self.silent
                self.silent = False
            case SnapshotFailed():
                pass

    def _is_exact(self) -> None:
        assert self.at is not None
        assert self.ledger == self.ledgers[self.at]


def _by_place(places: object) -> object:
    return sorted(places, key=repr)  # type: ignore[call-overload]


class World(RuleBasedStateMachine):
    """A publisher, the wires between it and a cursor, and the reader of the cursor's items."""

    @initialize(before=st.integers(0, 5), resume=st.none() | st.tuples(st.booleans(), st.integers(0, 5)))
    def begin(self, before: int, resume: tuple[bool, int] | None) -> None:
        # The resident blocks before message `seq` of an epoch, to compare the reader with.
        self.ledgers: dict[tuple[str, int], Ledger] = {("old", 3): {(0, "GPU"): Counter([9])}}
        self.life = 0
        self.version = 0
        self.live: deque[tuple[int, Events | Heartbeat | CatalogMessage | None, str]] = deque()
        self.hellos: deque[Hello] = deque()
        # Parts in flight of the current request.
        self.parts: deque[SnapshotPart] = deque()
        self.asked: int | None = None
        # The request is sent, but not received yet.
        self.request_under_way = False
        self._begin_life()
        for number in range(before):
            self._publish([stored(number % 3 + 1)])
        kept = None
        if resume is not None:
            same_life, seq = resume
            kept = (self.epoch, min(seq, before)) if same_life else ("old", 3)
        self.cursor = ReportCursor(
            resume=ReportResume(*kept) if kept else None, max_held=MAX_HELD, max_held_bytes=MAX_HELD_BYTES
        )
        self.reader = Reader(self.ledgers, kept)
        self.cursor.hello(self._hello())
        self.cursor.greeting_wanted = False

    def _begin_life(self) -> None:
        self.life += 1
        self.epoch = f"life{self.life}"
        self.next_seq = 0
        # Dropped messages that no message has reported yet.
        self.unsaid = 0
        self.version = 0
        self.ledger: Ledger = {}
        self.ledgers[self.epoch, 0] = {}

    def _publish(self, events: list[ReportEvent]) -> tuple[int, Events, str]:
        apply(self.ledger, events)
        seq = self.next_seq
        self.next_seq += 1
        self.ledgers[self.epoch, self.next_seq] = copy.deepcopy(self.ledger)
        dropped, self.unsaid = self.unsaid, 0
        return seq, Events(self.epoch, 1.0, 2.0, events, dropped=dropped), self.epoch

    def _hello(self) -> Hello:
        catalog = DeclaredCatalog([]) if self.version else None
        return Hello(1, self.epoch, 1.0, self.next_seq, "x", 1.0, catalog_version=self.version, catalog=catalog)

    @rule(
        hashes=HASHES,
        medium=MEDIA,
        what=st.sampled_from(["stored", "stored", "removed", "cleared"]),
        fate=st.sampled_from(["sent", "sent", "sent", "lost", "dropped", "damaged"]),
    )
    def publish(self, hashes: list[int], medium: str, what: str, fate: str) -> None:
        event: ReportEvent
        if what == "stored":
            event = stored(*hashes, medium=medium)
        elif what == "removed":
            held = self.ledger.get((0, medium), Counter())
            event = removed(*(block_hash for block_hash in set(hashes) if held[block_hash]), medium=medium)
        else:
            event = ReportCleared(medium)
        seq, message, epoch = self._publish([event])
        if fate == "sent":
            self.live.append((seq, message, epoch))
        elif fate == "damaged":
            self.live.append((seq, None, epoch))
        elif fate == "dropped":
            self.unsaid = message.dropped + 1

    @rule(lost=st.booleans())
    def beat(self, lost: bool) -> None:
        if not lost:
            message = Heartbeat(self.epoch, 1.0, 2.0, 1.0, summary(self.ledger), self.version)
            self.live.append((self.next_seq, message, self.epoch))

    @rule(lost=st.booleans())
    def declare(self, lost: bool) -> None:
        self.version += 1
        if not lost:
            message = CatalogMessage(self.epoch, 1.0, self.version, DeclaredCatalog([]))
            self.live.append((self.next_seq, message, self.epoch))

    @rule(drained=st.booleans(), cut=st.booleans())
    def restart(self, drained: bool, cut: bool) -> None:
        """Restart the publisher.

        Messages in flight arrive before the restart, after it, or never; also after answers of the next life.
        """
        if drained:
            self.deliver(len(self.live))
        elif cut:
            self.live.clear()
        if cut:
            self.parts.clear()
        self._begin_life()

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            seq, message, epoch = self.live.popleft()
            match message:
                case Events():
                    self.cursor.events(seq, message, 10 + seq)
                case Heartbeat():
                    self.cursor.heartbeat(seq, message, 10)
                case CatalogMessage():
                    self.cursor.catalog(seq, message)
                case None:
                    self.cursor.unreadable(seq, epoch, 10)

    @precondition(lambda self: self.cursor.request is not None and self.cursor.request != self.asked)
    @rule()
    def ask(self) -> None:
        """Request a snapshot on a fresh socket; parts in flight on the old one never arrive."""
        self.asked = self.cursor.request
        self.parts.clear()
        self.request_under_way = True
        self.cursor.on_request_sent()

    @precondition(lambda self: self.request_under_way)
    @rule(lost=st.none() | st.integers(0, 6), again=st.none() | st.integers(0, 3))
    def receive_request(self, lost: int | None, again: int | None) -> None:
        """Freeze the publisher's ledger as a snapshot, of which a part may be lost or doubled."""
        assert self.asked is not None
        self.request_under_way = False
        snapshot_parts = parts(self.ledger, self.asked, self.epoch, self.next_seq)
        if again is not None and again < len(snapshot_parts):
            snapshot_parts.insert(again, snapshot_parts[again])
        if lost is not None and lost < len(snapshot_parts):
            del snapshot_parts[lost]
        self.parts = deque(snapshot_parts)

    @rule(count=st.integers(1, 6))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.parts))):
            self.cursor.part(self.parts.popleft())

    @precondition(lambda self: self.cursor.request is not None)
    @rule(
        before=st.integers(0, 2),
        fates=st.lists(st.sampled_from(["sent", "sent", "lost", "damaged", "beat"]), max_size=MAX_HELD + 2),
        restarts=st.none() | st.integers(0, MAX_HELD),
    )
    def load_under_traffic(self, before: int, fates: list[str], restarts: int | None) -> None:
        """Load a whole snapshot while messages arrive, some published before the request is received.

        Another life may begin in between.
        """
        if self.asked != self.cursor.request:
            self.ask()
        for number, fate in enumerate(fates):
            if number == before:
                self.receive_request(None, None)
            if number == restarts:
                self._begin_life()
            if fate == "beat":
                self.beat(False)
            else:
                self.publish([number + 1], "GPU", "stored", fate)
        if len(fates) <= before:
            self.receive_request(None, None)
        self.deliver(len(self.live))
        self.answer(len(self.parts))

    @precondition(lambda self: self.asked is not None and self.asked == self.cursor.request)
    @rule()
    def overdue(self) -> None:
        self.cursor.snapshot_overdue()

    @rule()
    def greet(self) -> None:
        """Request a greeting as the shell does: an answer counts unless another greeting became wanted meanwhile."""
        self.cursor.greeting_wanted = False
        self.hellos.clear()
        self.hellos.append(self._hello())

    @precondition(lambda self: self.hellos)
    @rule()
    def hear_hello(self) -> None:
        hello = self.hellos.popleft()
        if not self.cursor.greeting_wanted:
            self.cursor.hello(hello)

    @rule()
    def doubt(self) -> None:
        self.cursor.request_snapshot()
        for item in self.cursor.take():
            self.reader.read(item)

    @rule()
    def expire(self) -> None:
        self.cursor.expire()
        for item in self.cursor.take():
            self.reader.read(item)

    @rule(up=st.booleans())
    def connection(self, up: bool) -> None:
        if up:
            self.cursor.connected()
        else:
            self.cursor.disconnected()

    @rule()
    def silence(self) -> None:
        self.cursor.silent(3.0)

    @invariant()
    def reader_is_never_misled(self) -> None:
        if not hasattr(self, "cursor"):
            return
        for item in self.cursor.take():
            self.reader.read(item)
        assert self.cursor.held <= MAX_HELD
        assert self.cursor.held_bytes <= MAX_HELD_BYTES or self.cursor.held == 1
        # The reader knows its state, or the cursor asks for it; both are true only if the consumer itself doubts its
        # state.
        greets = self.cursor.greeting_wanted or self.hellos
        assert self.cursor.request is not None or greets or self.reader.at is not None

    def teardown(self) -> None:
        if not hasattr(self, "cursor"):
            return
        # The world is quiet: nothing more is lost, and heartbeats arrive.
        for _ in range(4):
            self.beat(False)
            self.deliver(len(self.live))
            if self.cursor.greeting_wanted or self.hellos:
                # A greeting that is not answered is requested again.
                self.greet()
                self.hear_hello()
            self.reader_is_never_misled()
            if self.cursor.request is not None:
                self.ask() if self.cursor.request != self.asked else self.overdue()
                if self.cursor.request != self.asked:
                    self.ask()
                self.receive_request(None, None)
                self.answer(len(self.parts))
                self.reader_is_never_misled()
        assert self.cursor.request is None
        assert self.reader.at == (self.epoch, self.next_seq)
        assert self.reader.ledger == self.ledger
        assert not self.reader.silent


TestReportCursor = World.TestCase
TestReportCursor.settings = settings(max_examples=examples(300), stateful_step_count=40)
