# SPDX-License-Identifier: Apache-2.0
"""A model of one worker from end to end: a model engine as the truth, a faulty wire, and the router's real parts.

The real parts are the cursors of both streams, `Ingest`, `EngineLiveness` and the `Mirror`; the store is an image that
applies a `PendingCommit` as Redis does. All random choices come from one seed, so a seed determines a world. The
exception `Misled` names the broken invariant.

Safety: a worker is never `live` inside an answer, or while messages are held behind one. While it is `live` or
`catching_up`, the credited blocks were held at the shown seq by the engine's current life, or by a life whose end the
router does not know yet. While it is `suspect`, each credited block was held at some time by some life.

Liveness: within `QUIET_ROUNDS` rounds after the last fault the worker is `live`, its catalog and hash scheme are the
engine's, and its credit is full. Full credit means:

- with the patch, all blocks that the engine holds;
- with a replay endpoint, all blocks stored since the beginning of the replay ring or since the last batch that was lost
  for good;
- otherwise, all blocks stored from the second round on.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.messages import ReportEvent
from kvrouter.events.vllm.wire import WireEvent
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from kvrouter.router.model.workers.stream_state import StreamState, credited
from tests.support.faulty_wire import FaultyWire
from tests.support.model_engine import (
    LAYOUTS,
    PROMPT_TOKENS,
    PROMPTS,
    QUIET_PROMPT,
    SCHEMES,
    UNKNOWN_SCHEME,
    UNNAMED,
    Layout,
    Life,
)
from tests.support.store_image import Misled

# Rounds after the last fault, each with one batch, and at most a check's interval (10 s) apart.
QUIET_ROUNDS = 8
# Events in a batch that changes nothing, and the number of such batches after which the router has forgotten odd ones.
STEADY_EVENTS = 64
QUIET_ODD_BATCHES = 20
# Turns of requests and answers between two batches.
TURNS = 3
# Share of restarts of which the router learns only when the new life has reached the seq at which the old one ended,
# and the largest seq for which a restart does so.
UNHEARD_SHARE = 0.4
MOST_UNHEARD = 40
RING = 8
LONG_RING = 200


class World(FaultyWire):
    """One world; `run` takes random steps in it and raises `Misled` if an invariant is broken."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
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

    def run(self, steps: int) -> int:
        """Take this many steps and then end quietly; return the number of all steps."""
        actions = [action for action, _ in self.actions]
        weights = [weight for _, weight in self.actions]
        for action in self.rng.choices(actions, weights, k=steps):
            self.now += 0.5
            self.trace.append(action.__name__)
            action()
            self.judge_safety()
        return steps + self._end_quietly()

    def _end_quietly(self) -> int:
        """End all faults, and check that the worker becomes live with full credit."""
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
            # After a silence, the cursor requests the batches that it may have missed at the end.
            if number % 2:
                self.check()
            steps += self._turn()
            self.judge_safety()
        self._judge_liveness(life, first_quiet)
        return steps

    def _turn(self) -> int:
        """Let everything happen that needs no further batch, and return the number of turns."""
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

    def _steady(self, life: Life) -> tuple[list[WireEvent], list[ReportEvent]]:
        """Return at least `STEADY_EVENTS` events after which the engine holds the same blocks as before."""
        wire, report = life.compute(QUIET_PROMPT, PROMPT_TOKENS)
        while len(wire) < STEADY_EVENTS:
            for more in (life.compute(QUIET_PROMPT, PROMPT_TOKENS), life.trim()):
                wire += more[0]
                report += more[1]
        return wire, report

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
        learned_groups = {(g.group_idx, g.kind, g.block_size, g.sliding_window) for g in catalog.groups}
        engine_groups = {(g.group_idx, g.kind, g.block_size, g.window) for g in life.layout.groups}
        if learned_groups != engine_groups or catalog.hash_block_size != life.layout.hash_block_size:
            raise Misled(f"live with the catalog {learned_groups}, the engine has {engine_groups}")
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
        draw = rng.random()
        if draw < 0.5:
            events = life.compute(rng.randrange(PROMPTS), rng.randrange(8, PROMPT_TOKENS + 1))
        elif draw < 0.75:
            events = life.evict(rng, rng.randrange(1, 6))
        elif draw < 0.85:
            events = life.offload(rng)
        elif draw < 0.87:
            events = life.clear()
        elif draw < 0.875 and not life.patched:
            events, self.odd = life.odd_removal(rng), True
        else:
            events = life.trim()
        if draw > 0.995:
            life.skip()
            return
        self._say(life, *events, readable=draw < 0.985)

    def _say(self, life: Life, wire: list[WireEvent], report: list[ReportEvent], *, readable: bool = True) -> None:
        payload, events = life.say(wire, report, readable=readable)
        fate = self.rng.random() if self.faulty else 1.0
        message: object = events if isinstance(self.cursor, ReportCursor) else payload
        if not self.joined or fate < 0.06:
            return
        delivery = (life.next_seq - 1, message)
        if fate < 0.09 and self.swapped is None:
            self.swapped = delivery
            return
        self.live.append(delivery)
        if fate < 0.12:
            self.live.append(delivery)
        if self.swapped is not None:
            self.live.append(self.swapped)
            self.swapped = None

    def kill(self) -> None:
        if self.life is not None:
            self.cut()
            self.life.ended = True
            self.life = None

    def restart(self) -> None:
        """Replace the engine's life by a new one.

        In a share of the restarts (`UNHEARD_SHARE`) the router learns of it only when the new life has sent as many
        batches as the old one, so that its next seq is the one that the router expects.
        """
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
