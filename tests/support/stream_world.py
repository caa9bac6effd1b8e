# SPDX-License-Identifier: Apache-2.0
"""One worker from end to end as a model: an engine that holds the truth, a wire with faults, and the router's real
parts.

Real are the cursors of both streams, `Ingest`, `EngineLiveness` and the `Mirror`; the store is an image that takes
`PendingCommit`es as Redis takes commits. Everything is drawn from one seed, so a seed is a world. `Misled` says which
law was broken.

Safety: while a worker is `live` or `catching_up`, what is credited was held at the shown seq, by the engine's life of
now or by one whose end the router has not heard of; while it is `suspect`, each block was held once by some life.
Liveness: once faults end, within QUIET_ROUNDS rounds the worker is `live`, its catalog and hash scheme are the
engine's, and its credit is full: all that is held (with the patch), all that was stored since the replay ring begins or
since a batch was lost for good (with a replay endpoint), all that is stored from the second round on (else).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from model_engine import (
    LAYOUTS,
    PROMPT_TOKENS,
    PROMPTS,
    QUIET_PROMPT,
    SCHEMES,
    UNKNOWN_SCHEME,
    UNNAMED,
    Held,
    Layout,
    Life,
)

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.items import Declared, Greeted, HeartbeatSeen, Loaded, ReportBatch
from kvrouter.events.patch.messages import Events, Heartbeat, Hello, ReportEvent, SnapshotPart
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.stream_items import Batch, Connected, Disconnected
from kvrouter.router.common.ids import Place, WorkerKey
from kvrouter.router.ingest.engine_liveness import (
    EngineBack,
    EngineLiveness,
    EngineLost,
    EngineRestarted,
    NoPulse,
    Pulse,
)
from kvrouter.router.ingest.ingest import Ingest
from kvrouter.router.ingest.pending_commit import PendingCommit
from kvrouter.router.kvcache.scheme_verification import SchemeState
from kvrouter.router.matching.mirror import Mirror
from kvrouter.router.workers.registration import NO_PATCH, CatalogSpec, Registration
from kvrouter.router.workers.stream_state import StreamState, credited

WORKER = WorkerKey("m", "w")
MIRROR_BYTES = 1 << 24
# Rounds of a batch each after the last fault, at most a check's interval (10 s) apart.
QUIET_ROUNDS = 8
# Events of one batch that say nothing new: so many batches of these end what odd events left behind.
STEADY_EVENTS = 64
QUIET_ODD_BATCHES = 20
# Of requests and answers between two batches.
TURNS = 3
MAX_HELD = 6
RING = 8
TRACE_LINES = 80
# Restarts after which the next life is heard of only where the old one ended, and how many batches that may take.
UNHEARD_SHARE = 0.4
MOST_UNHEARD = 40
LONG_RING = 200


class Misled(AssertionError):
    """A law was broken."""


class StoreImage:
    """What Redis holds of the worker, and the mirror that follows it."""

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.seq: int | None = None
        self.places: dict[Place, set[int]] = {}
        self.copies: dict[tuple[Place, int], int] = {}
        self.meta: dict[str, bytes] = {}
        # When the engine's process started, as the follower was told.
        self.start_s: float | None = None
        self.mirror = Mirror(MIRROR_BYTES)

    def commit(self, flush: PendingCommit, start_s: float | None) -> None:
        if flush.opens_epoch:
            if flush.epoch == self.epoch:
                raise Misled(f"epoch {flush.epoch} is opened twice")
            self.epoch, self.seq, self.places, self.copies, self.meta = flush.epoch, None, {}, {}, {}
            self.mirror.begin_epoch(WORKER, flush.epoch)
        if flush.epoch != self.epoch:
            raise Misled(f"a commit of epoch {flush.epoch} after {self.epoch}")
        self.meta |= flush.meta
        self.start_s = start_s
        if flush.seqs is None:
            if flush.changes or flush.copies:
                raise Misled("changes without a batch are not committed")
            return
        if self.seq is not None and flush.seqs[0] != self.seq + 1:
            raise Misled(f"batches {flush.seqs} do not follow {self.seq}")
        self.seq = flush.seqs[1]
        for change in flush.changes:
            held = self.places.setdefault(change.place, set())
            added, removed = set(change.added.tolist()), set(change.removed.tolist())
            if added & held or removed - held:
                raise Misled("a change is none")
            self.places[change.place] = (held - removed) | added
            self.mirror.discard(WORKER, change.place, change.removed)
            self.mirror.add(WORKER, change.place, change.added)
        for place, block, count in flush.copies:
            if count > 1:
                self.copies[place, block] = count
            else:
                self.copies.pop((place, block), None)

    def arrays(self) -> dict[Place, np.ndarray]:
        return {place: np.array(sorted(held), np.uint64) for place, held in self.places.items()}

    def credited(self) -> Held:
        known = self.mirror.worker(WORKER)
        if known is None:
            return {}
        found = {place: frozenset(self.mirror.held(WORKER, place).tolist()) for place in known.places}
        return {place: held for place, held in found.items() if held}

    def spoil(self, rng: random.Random) -> str:
        """Another program writes into the worker's keys."""
        garbage = rng.choice([b"", b"{", b"\xff\xfe", b"-1", b"[]", b'{"algo":"md5"}', b"9" * 40])
        field = rng.choice(["learned", "scheme", "fingerprint", "gaps", "declared", "report_epoch", "copies"])
        if field == "copies":
            place = rng.choice([*self.places, Place(0, "GPU")])
            self.copies[place, rng.randrange(1, 9)] = rng.choice([0, -3, 70_000, 1 << 70])
        else:
            self.meta[field] = garbage
        return field


class World:
    """One world. `run` takes its steps; a broken law raises Misled."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.kind = rng.choice(["stock", "stock", "plain", "patched", "patched"])
        self.http = rng.random() < 0.6
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.store = StoreImage()
        self.epochs = 0
        self.now = 0.0
        self.lives: list[Life] = []
        self.life: Life | None = None
        self.wired = self.joined = False
        # News of connections that the cursor has not been given; messages under way to it.
        self.news: deque[str] = deque()
        self.live: deque[tuple[int, object]] = deque()
        self.swapped: tuple[int, object] | None = None
        self.answers: deque[tuple[int, bytes] | None] = deque()
        self.served = 0
        self.replay_up = True
        self.hellos: deque[Hello] = deque()
        self.parts: deque[SnapshotPart] = deque()
        self.asked: int | None = None
        self.inbox: deque[object] = deque()
        # For each lost connection that waits there, the lives that had ended by then.
        self.ends: deque[list[Life]] = deque()
        self.faulty = True
        # Whether the last step was an odd event that takes its time to be forgotten.
        self.odd = False
        self._begin_life()
        self._begin_router()
        self.actions: list[tuple[Callable[[], None], int]] = [
            (self.publish, 30),
            (self.deliver, 22),
            (self.connect, 10),
            (self.deliver_news, 8),
            (self.process, 14),
            (self.commit, 10),
            (self.cut, 3),
            (self.restart, 3),
            (self.kill, 1),
            (self.toggle_replay, 2),
            (self.serve, 8),
            (self.answer, 12),
            (self.overdue, 4),
            (self.check, 5),
            (self.pulse, 5),
            (self.change_router, 2),
            (self.spoil, 1),
            (self.greet, 4),
            (self.hear_hello, 6),
            (self.beat, 4),
            (self.ask_snapshot, 8),
            (self.silence, 1),
            (self.change_source, 2),
        ]

    # -- the run

    def run(self, steps: int) -> int:
        """Returns the number of steps taken, those of the quiet end included."""
        actions = [action for action, _ in self.actions]
        weights = [weight for _, weight in self.actions]
        for action in self.rng.choices(actions, weights, k=steps):
            self.now += 0.5
            self.trace.append(action.__name__)
            action()
            self.judge_safety()
        return steps + self._end_quietly()

    def _end_quietly(self) -> int:
        """No fault any more: the worker must become live with full credit."""
        self.faulty = False
        self.trace.append("-- quiet")
        self.replay_up = True
        if self.life is None:
            self._begin_life()
        life = self._alive()
        if life.scheme is UNKNOWN_SCHEME:
            self.restart()
            life = self._alive()
        first_quiet = life.next_seq
        steps = 0
        for number in range(QUIET_ROUNDS):
            self.now += 10.0
            if number == 1:
                first_quiet = life.next_seq
            self._say(life, *life.compute(QUIET_PROMPT, PROMPT_TOKENS))
            self._say(life, *life.trim())
            if self.odd and number == 2:
                for _ in range(QUIET_ODD_BATCHES):
                    self._say(life, *self._steady(life))
                    self._turn()
            steps += self._turn()
            # A stream that was silent for long enough is asked for its tail.
            if number % 2:
                self.check()
            steps += self._turn()
            self.judge_safety()
        self._judge_liveness(life, first_quiet)
        return steps

    def _turn(self) -> int:
        """All that happens by itself between two batches."""
        steps = 0
        for _ in range(TURNS):
            self.pulse()
            self.change_source()
            if not self.wired:
                self.connect()
            self.joined = self.wired
            while self.news:
                self.deliver_news()
            while self.live:
                self.deliver()
            if isinstance(self.cursor, ReportCursor):
                self.greet()
                self.hear_hello()
                self.beat()
                while self.live:
                    self.deliver()
                self.ask_snapshot()
                while self.parts:
                    self.answer()
            else:
                if self.cursor.degraded:
                    self.check()
                if self.cursor.request is not None and self.cursor.request.number == self.served and not self.answers:
                    self.overdue()
                self.serve()
                while self.answers:
                    self.answer()
            self.process()
            self.commit()
            steps += 1
        return steps

    def _steady(self, life: Life) -> tuple[list[object], list[ReportEvent]]:
        """Many events, and as much as before is held after them."""
        wire, report = life.compute(QUIET_PROMPT, PROMPT_TOKENS)
        while len(wire) < STEADY_EVENTS:
            for more in (life.compute(QUIET_PROMPT, PROMPT_TOKENS), life.trim()):
                wire += more[0]
                report += more[1]
        return wire, report

    # -- laws

    @property
    def state(self) -> StreamState:
        return self.ingest.state

    def judge_safety(self) -> None:
        state = self.state
        if not credited(state, False) or self.store.epoch != self.ingest.held.epoch:
            return
        shown = self.store.credited()
        if not shown:
            return
        suspect = state is StreamState.SUSPECT
        for life in self.lives:
            if suspect or not life.end_heard:
                held = life.held(self.store.seq)
                if held is not None and all(blocks <= held.get(place, frozenset()) for place, blocks in shown.items()):
                    return
        if suspect and all(
            any(block in held.get(place, ()) for life in self.lives for held in life.held_after)
            for place, blocks in shown.items()
            for block in blocks
        ):
            return
        raise Misled(
            f"{state.value} ({self.ingest.reason}): credited at seq {self.store.seq} with what no life held then"
        )

    def _judge_liveness(self, life: Life, first_quiet: int) -> None:
        ingest, store = self.ingest, self.store
        if self.state is not StreamState.LIVE:
            raise Misled(f"not live at the end, but {self.state.value}: {ingest.reason}")
        if store.epoch != ingest.held.epoch or store.seq != life.next_seq - 1:
            raise Misled(f"live at seq {store.seq}, the engine is at {life.next_seq - 1}: {ingest.reason}")
        catalog = ingest.profile.catalog
        if catalog.problem is not None:
            raise Misled(f"live without a catalog: {catalog.problem}")
        known = {(g.group_idx, g.kind, g.block_size, g.sliding_window) for g in catalog.groups}
        true = {(g.group_idx, g.kind, g.block_size, g.window) for g in life.layout.groups}
        if known != true or catalog.hash_block_size != life.layout.hash_block_size:
            raise Misled(f"live with the catalog {known}, the engine has {true}")
        if (
            ingest.profile.identity.scheme != life.scheme
            or ingest.profile.identity.standing is not SchemeState.VERIFIED
        ):
            raise Misled(
                f"live with the hash scheme {ingest.profile.identity.label}, the engine has {life.scheme.label}"
            )
        shown = store.credited()
        if self.kind == "patched" and life.patched:
            full = life.now
        elif self.kind == "plain":
            full = life.stored_since(first_quiet)
        else:
            full = life.stored_since(max(life.ring[0][0], life.last_hole + 1))
        for place, blocks in full.items():
            if missing := blocks - shown.get(place, frozenset()):
                raise Misled(f"live without {len(missing)} blocks of {place.text}: {ingest.reason}")

    # -- the engine

    def _alive(self) -> Life:
        assert self.life is not None
        return self.life

    def _begin_life(self) -> None:
        rng = self.rng
        before = self.lives[-1] if self.lives else None
        layout: Layout = rng.choice(LAYOUTS if self.kind == "patched" else (*LAYOUTS, UNNAMED))
        scheme = rng.choice(SCHEMES)
        if before is not None and before.scheme is not UNKNOWN_SCHEME and rng.random() < 0.5:
            layout, scheme = before.layout, before.scheme
        elif self.faulty and rng.random() < 0.05:
            scheme = UNKNOWN_SCHEME
        patched = self.kind == "patched" and (not self.faulty or rng.random() < 0.9)
        ring = rng.choice([RING, LONG_RING, LONG_RING])
        self.life = Life(len(self.lives), layout, scheme, ring=ring, patched=patched)
        self.lives.append(self.life)
        self.odd = False
        self.trace.append(f"life {self.life.number}: {layout.name}, {scheme.label}, ring {ring}, patched {patched}")

    def publish(self) -> None:
        if self.life is not None:
            self._publish(self.life)

    def _publish(self, life: Life) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.5:
            said = life.compute(rng.randrange(PROMPTS), rng.randrange(8, PROMPT_TOKENS + 1))
        elif what < 0.75:
            said = life.evict(rng, rng.randrange(1, 6))
        elif what < 0.85:
            said = life.offload(rng)
        elif what < 0.87:
            said = life.clear()
        elif what < 0.875 and not life.patched:
            said, self.odd = life.odd_removal(rng), True
        else:
            said = life.trim()
        if what > 0.995:
            life.skip()
            return
        self._say(life, *said, readable=what < 0.985)

    def _say(self, life: Life, wire: list[object], report: list[ReportEvent], *, readable: bool = True) -> None:
        payload, events = life.say(wire, report, readable=readable)
        fate = self.rng.random() if self.faulty else 1.0
        message: object = events if isinstance(self.cursor, ReportCursor) else payload
        if not self.joined or fate < 0.06:
            return
        sent = (life.next_seq - 1, message)
        if fate < 0.09 and self.swapped is None:
            self.swapped = sent
            return
        self.live.append(sent)
        if fate < 0.12:
            self.live.append(sent)
        if self.swapped is not None:
            self.live.append(self.swapped)
            self.swapped = None

    def kill(self) -> None:
        if self.life is not None:
            self.cut()
            self.life.ended = True
            self.life = None

    def restart(self) -> None:
        """Often the next life has said as much as the old one before anybody hears of it: its next seq is the one
        waited for."""
        before = self.life
        unheard = before is not None and before.next_seq <= MOST_UNHEARD and self.rng.random() < UNHEARD_SHARE
        unheard = unheard and self.faulty
        while unheard and self.live:
            self.deliver()
        self.kill()
        self._begin_life()
        if before is not None and unheard:
            self.replay_up = self.rng.random() < 0.5
            while self._alive().next_seq < before.next_seq:
                self._publish(self._alive())

    # -- the wire

    def connect(self) -> None:
        if self.wired or self.life is None:
            return
        if isinstance(self.cursor, ReportCursor) and not self.life.patched:
            return
        while self.news:
            self.deliver_news()
        self.wired = True
        self.joined = not self.faulty or self.rng.random() < 0.7
        self.news.append("up")

    def cut(self) -> None:
        """The connection breaks: what was under way is read before the news, or lost."""
        self.answers.clear()
        self.parts.clear()
        self.hellos.clear()
        if self.wired:
            while self.news:
                self.deliver_news()
            if self.rng.random() < 0.5:
                while self.live:
                    self.deliver()
            self.news.append("down")
        self.live.clear()
        self.swapped = None
        self.wired = self.joined = False

    def deliver_news(self) -> None:
        if not self.news:
            return
        if self.news.popleft() == "up":
            self.joined = True
            self.cursor.connected()
            if isinstance(self.cursor, ReportCursor):
                self.cursor.greeting_wanted = True
        else:
            before = len(self.cursor.items)
            self.cursor.disconnected()
            if len(self.cursor.items) > before:
                self.ends.append([life for life in self.lives if life.ended])
        self._collect()

    def deliver(self) -> None:
        if not self.live:
            return
        seq, message = self.live.popleft()
        cursor = self.cursor
        if isinstance(cursor, Cursor):
            assert isinstance(message, bytes)
            cursor.live(seq, message)
        elif isinstance(message, Events):
            if self.faulty and self.rng.random() < 0.02:
                cursor.unreadable(seq, message.epoch, 10)
            else:
                cursor.events(seq, message, 10)
        else:
            assert isinstance(message, Heartbeat)
            cursor.heartbeat(seq, message, 10)
        self._collect()

    def _collect(self) -> None:
        self.inbox.extend(self.cursor.take())
        if self.cursor_wants() is not None and isinstance(self.cursor, Cursor) and self.cursor.held > MAX_HELD:
            raise Misled("more is held than may be")
        if not self.faulty or self.rng.random() < 0.7:
            self.process()

    def cursor_wants(self) -> object:
        return self.cursor.request

    # -- replay

    def toggle_replay(self) -> None:
        self.replay_up = not self.replay_up

    def serve(self) -> None:
        """The engine takes the request: its answer is what it remembers now, or a part of it."""
        cursor, life = self.cursor, self.life
        if not isinstance(cursor, Cursor):
            return
        # Both sockets lose an engine that dies at once, and another one needs its time to begin.
        while "down" in self.news:
            self.deliver_news()
        if cursor.request is None or cursor.request.number == self.served:
            return
        self.served = cursor.request.number
        self.answers.clear()
        if life is None or not self.replay_up:
            return
        found: list[tuple[int, bytes] | None] = [batch for batch in life.ring if batch[0] >= cursor.request.start]
        found.append(None)
        if self.faulty and self.rng.random() < 0.3:
            # The first one and the end travel alone; of what piles up behind them some is dropped, or all of the rest.
            lost = {self.rng.randrange(1, len(found) + 1) for _ in range(2)}
            found = [batch for at, batch in enumerate(found) if at not in lost]
        self.answers = deque(found)

    def answer(self) -> None:
        if isinstance(self.cursor, ReportCursor):
            if self.parts:
                self.cursor.part(self.parts.popleft())
                self._collect()
            return
        for _ in range(self.rng.randrange(1, 6)):
            request = self.cursor.request
            if request is None or request.number != self.served:
                self.answers.clear()
            if not self.answers:
                return
            batch = self.answers.popleft()
            if batch is None:
                self.cursor.replay_ended()
            else:
                self.cursor.replayed(*batch)
            self._collect()

    def overdue(self) -> None:
        cursor = self.cursor
        if isinstance(cursor, Cursor):
            if cursor.request is not None and not self.answers:
                cursor.replay_overdue()
        elif self.asked is not None and self.asked == cursor.request:
            cursor.snapshot_overdue()
        self._collect()

    def check(self) -> None:
        if isinstance(self.cursor, Cursor) and not self.news:
            self.cursor.check()
            self._collect()

    # -- the patch

    def greet(self) -> None:
        cursor, life = self.cursor, self.life
        if isinstance(cursor, ReportCursor) and life is not None and life.patched and cursor.greeting_wanted:
            cursor.greeting_wanted = False
            self.hellos = deque([life.hello()])

    def hear_hello(self) -> None:
        cursor = self.cursor
        if isinstance(cursor, ReportCursor) and self.hellos:
            hello = self.hellos.popleft()
            if not cursor.greeting_wanted:
                cursor.hello(hello)
                self._collect()

    def beat(self) -> None:
        life = self.life
        heard = self.joined and (not self.faulty or self.rng.random() < 0.8)
        if isinstance(self.cursor, ReportCursor) and life is not None and life.patched and heard:
            self.live.append((life.next_seq, life.heartbeat()))

    def ask_snapshot(self) -> None:
        cursor, life = self.cursor, self.life
        if not isinstance(cursor, ReportCursor) or cursor.request is None:
            return
        if cursor.request != self.asked:
            self.asked = cursor.request
            self.parts.clear()
            cursor.on_request_sent()
            if life is not None and life.patched:
                made = life.parts(self.asked)
                if self.faulty and self.rng.random() < 0.2:
                    del made[self.rng.randrange(len(made))]
                self.parts = deque(made)
        elif not self.parts:
            cursor.snapshot_overdue()
        self._collect()

    def silence(self) -> None:
        if isinstance(self.cursor, ReportCursor):
            self.cursor.silent(3.0)
            self._collect()

    # -- the router

    def _new_epoch(self) -> str:
        self.epochs += 1
        return f"e{self.epochs}"

    def _new_ingest(self) -> Ingest:
        registration = Registration(
            WORKER,
            events="tcp://127.0.0.1:1",
            replay=None if self.kind == "plain" else "tcp://127.0.0.1:2",
            patch=None if self.kind == "patched" else NO_PATCH,
            url="http://127.0.0.1:3" if self.http else None,
            catalog=CatalogSpec(offload_blocks_per_chunk=1),
        )
        return Ingest(registration, seed=None, decoder=BatchDecoder(), new_epoch=self._new_epoch)

    def _begin_router(self) -> None:
        """A process takes the worker over, from what the store holds."""
        store = self.store
        self.ingest = self._new_ingest()
        self.vitals = EngineLiveness(store.start_s)
        if store.epoch is not None:
            # What another process reads is loaded anew.
            store.mirror.begin_epoch(WORKER, store.epoch)
            for place, held in store.arrays().items():
                store.mirror.add(WORKER, place, held)
        if store.epoch is not None and store.seq is not None:
            try:
                self.ingest.restore(store.epoch, store.seq, store.arrays(), dict(store.copies), dict(store.meta))
            except (msgspec.MsgspecError, ValueError) as error:
                self.trace.append(f"not restored: {error}")
                self.ingest = self._new_ingest()
        self._follow()

    def _follow(self) -> None:
        """Sockets are opened to one of the two streams."""
        self.inbox.clear()
        self.ends.clear()
        self.live.clear()
        self.news.clear()
        self.answers.clear()
        self.parts.clear()
        self.hellos.clear()
        self.swapped = None
        self.wired = self.joined = False
        self.served, self.asked = 0, None
        ingest = self.ingest
        self.cursor: Cursor | ReportCursor
        if self.kind == "patched" and self.life is not None and self.life.patched:
            ingest.follow_reports()
            self.cursor = ReportCursor(resume=ingest.reports.resume, max_held=MAX_HELD)
        else:
            ingest.follow_stock()
            self.cursor = Cursor(replay=self.kind != "plain", resume=ingest.resume_point, max_held=MAX_HELD)
        self.trace.append(f"follows with {type(self.cursor).__name__}, resume {ingest.resume_point}")

    def change_source(self) -> None:
        """The other stream is followed: the patch answers, or has been silent for too long."""
        patched = self.life is not None and self.life.patched
        if self.kind != "patched" or self.life is None or patched == isinstance(self.cursor, ReportCursor):
            return
        self.ingest.pause("followed again in a moment")
        if not self.ingest.held.continues(self.store.epoch, self.store.seq):
            self.ingest.held.rewrite_epoch()
        self._follow()

    def change_router(self) -> None:
        """A lease changes hands, in order or after a crash; or the process begins anew."""
        if self.rng.random() < 0.5:
            self.process()
            self.commit()
        self._begin_router()

    def spoil(self) -> None:
        self.trace.append(f"spoils {self.store.spoil(self.rng)}")
        self._begin_router()

    def process(self) -> None:
        """The ingest takes what waits for it."""
        ingest = self.ingest
        while self.inbox:
            item = self.inbox.popleft()
            self.trace.append(f"  {_short(item)}")
            ingest.apply(item, self.now)  # type: ignore[arg-type]
            if isinstance(item, Disconnected):
                for life in self.ends.popleft():
                    life.end_heard = True
            elif isinstance(item, Batch | ReportBatch):
                self._hear_new_life(item)
            elif isinstance(item, Connected) and not self.faulty:
                self.pulse()
            if ingest.reports.wants_snapshot is not None and isinstance(self.cursor, ReportCursor):
                self.cursor.request_snapshot()
                ingest.reports.wants_snapshot = None
                self.inbox.extend(self.cursor.take())

    def commit(self) -> None:
        flush = self.ingest.held.take()
        if flush is not None:
            self.store.commit(flush, self.vitals.start_s)

    def pulse(self) -> None:
        """The engine's HTTP is asked."""
        if not self.http:
            return
        # What was received before the answer is taken before it.
        self.process()
        life = self.life
        sign = NoPulse("refused", gone=True) if life is None else Pulse(life.start_s)
        for found in self.vitals.observe(sign, self.now):
            self.ingest.on_liveness(found)
            if isinstance(found, EngineLost | EngineRestarted):
                self._hear_ends()
            if isinstance(found, EngineBack | EngineRestarted):
                if isinstance(self.cursor, ReportCursor):
                    self.cursor.expire()
                else:
                    self.cursor.expire("the engine may be another")
                self.ingest.reports.wants_snapshot = None
                self._collect()

    def _hear_ends(self) -> None:
        for life in self.lives:
            life.end_heard |= life.ended

    def _hear_new_life(self, item: Batch | ReportBatch) -> None:
        life = self.life
        if life is None:
            return
        said = isinstance(item, Batch) and any(payload == item.payload for _, payload in life.ring)
        if said or (isinstance(item, ReportBatch) and item.message.epoch == life.epoch):
            self._hear_ends()


def _short(item: object) -> str:
    """An item in the trace."""
    if isinstance(item, Batch):
        return f"Batch {item.seq}{' replayed' if item.replayed else ''}"
    if isinstance(item, ReportBatch):
        return f"ReportBatch {item.seq} of {item.message.epoch}"
    return type(item).__name__ if isinstance(item, Loaded | HeartbeatSeen | Greeted | Declared) else str(item)
