# SPDX-License-Identifier: Apache-2.0
"""The laws of a fleet. The truth is the engines' own counts; `Broken` names the law, the router and the worker.

After each step of a router, and at each answer:

- *Credit.* What a `live` or `catching_up` worker is credited with was held at the shown seq by the engine's present
  life, or by one whose end the router need not know yet. What a `suspect` one is credited with was held at some time.
- *Age.* A `live` worker misses no batch that was sent `AGE_S` ago; time in which its engine is silent does not count while
  nobody reads reports of a patch.
- *Staleness.* A `live` worker is at most `LAG_S` behind what its follower showed (`staleness.py`).
- *Agreement.* Two routers that show a worker as `live` at the same position credit the same blocks and hits.
- *Doubt.* A `suspect` worker has no credit after `suspect_credit_s`.
- *Fence,* *lease* and *memory.* Routers write what they may (`written.py`).
- *Followers* and *news.* Workers are followed, and what that brings reaches all (`following.py`).
- *Alarm.* No router says that the store lost data if it has not.
- *Load.* No sum is negative, and routers agree about the load of each (`shared_load.py`).

At the end, `QUIET_S` after the last fault:

- *Followers.* Each worker is followed by exactly one router within `FOLLOWED_S`, and is live in all. The routers' shares
  of the workers differ by one at most.
- *Full credit.* Each router credits what patch or replay endpoint can bring, else all since the quiet began.
- *Reservations.* Each ended once, and all sums are zero.
- *Counters.* The metrics agree with what happened (`counters.py`).
- *Bounds.* No router has more tasks, sockets, connections, tables or objects than its workers need (`bounds.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.stream_machine import Phase
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.workers.stream_state import StreamState
from tests.simulation.bounds import problem_of_followers, problem_of_numbers, problem_of_tables
from tests.simulation.counters import DATA_LOST, problem_of_counters, problem_of_gauges
from tests.simulation.engine import MODEL, Engine, Kind, LifeSpan
from tests.simulation.following import Following
from tests.simulation.router import Router
from tests.simulation.shared_load import SharedLoad
from tests.simulation.staleness import LAG_S, Followed
from tests.simulation.store_server import StoreServer
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.written import Written
from tests.support.model_engine import PROMPTS, TOKENS

Held = dict[Place, frozenset[int]]

# Time from the end of a life to the router's change of state, while packets arrive. Most of it is the time in which
# knowledge of other routers counts without a word of theirs.
NEWS_S = 2.5
# The longest time from a message that was dropped on its way until the engine's next one shows it: the pause of an engine
# or its patch (1 s), and a packet that is sent again.
LOSS_S = 1.25
# How old a live answer may be: what the routers take, after the follower can know.
AGE_S = LAG_S + LOSS_S
# How long after the last batch, or the end of what kept it from an answer, a silent stream has been checked: 10 s
# (`idle_check_s`), and the longest pause of an answer.
CHECKED_S = 15.0
# ZMQ closes a connection on which nothing arrives after this time (`LinkSettings`: ping_s, ping_answer_s, and a pause).
DEAF_S = 27.0
# A process that stood still may answer once before it looks at its clock.
RESUMED_S = 0.5
# The documented bound of `tests/chaos`.
QUIET_S = 75.0
# How long after the store lost writes a router may find that out.
REPAIRED_S = 15.0


class Broken(Exception):
    """A broken law."""


class Laws:
    """The judge of one world."""

    def __init__(
        self, loop: VirtualLoop, engines: Sequence[Engine], routers: Sequence[Router], store: StoreServer
    ) -> None:
        self._loop = loop
        self._engines = {engine.worker: engine for engine in engines}
        self._routers = routers
        # Until when packets from an engine may not have reached some router.
        self.deaf_until_s: dict[str, float] = {}
        # For each router and worker, what was judged last.
        self._judged: dict[tuple[str, WorkerKey], tuple[Any, str | None, int | None]] = {}
        self._followed = Followed(loop.time)
        # When the follower of each worker last read the engine's own topic.
        self._topic_read_s: dict[WorkerKey, float] = {}
        # The oldest `live` answer of a router that does not follow the worker.
        self.most_lag_s = 0.0
        self._asked = 0
        # How often two routers were compared at the same position.
        self.agreements = 0
        self.judgements = 0
        # How many answers were judged, by state.
        self.states: dict[str, int] = {}
        # For each router and worker that it doubts, since when by its own clock, and by that of the world.
        self._doubted: dict[tuple[str, WorkerKey], tuple[float, float]] = {}
        self.written = Written(store, routers, list(self._engines), loop.time, self.fail)
        self._following = Following(self._engines, routers, self.written, loop.time)
        # Until when routers may find that the store lost writes.
        self.repaired_s = 0.0
        self._shared_load = SharedLoad(routers, self.written, loop.time)
        # A law that was broken outside a step; it is raised at the next one.
        self.broken = ""

    def fail(self, problem: str) -> None:
        """Note a law that was broken outside a step."""
        self.broken = problem

    def store_loses(self, for_s: float) -> None:
        """Note that the store may lose writes from now on for some time."""
        self.repaired_s = max(self.repaired_s, self._loop.time() + for_s + REPAIRED_S)

    def take_line(self, name: str, text: str) -> None:
        """Judge a line of the history."""
        if self._loop.time() > self.repaired_s and DATA_LOST.search(text):
            self.fail(f"alarm: {name} says that the store lost data, which it has not: {text}")

    # -- while it runs

    def after_step(self) -> None:
        """Judge the router whose callback ran, as far as it changed."""
        if self.broken:
            raise Broken(self.broken)
        process = self._loop.last
        for router in self._routers:
            if router.process is process:
                self.judge(router)

    def judge(self, router: Router, *, whole: bool = False) -> None:
        """Judge what a router shows of each worker; `whole` also if it shows the same as before."""
        core = router.core
        if core is None or not router.answers:
            return
        for worker, follower in core.registry.followers.items():
            view, shown = follower.state.view, follower.state.shown
            if follower.lease.held and follower.state.phase is Phase.STOCK:
                self._topic_read_s[worker] = self._loop.time()
            key = (router.name, worker)
            now = (view, shown.epoch, shown.seq)
            before = self._judged.get(key)
            if whole or before is None or before[0] is not view or before[1:] != now[1:]:
                self._judged[key] = now
                if worker in self._engines:
                    self._judge_worker(router, self._engines[worker], follower)

    def _judge_worker(self, router: Router, engine: Engine, follower: Follower) -> None:
        view, seq = follower.state.view, follower.state.shown.seq
        self.judgements += 1
        self.states[view.state.value] = self.states.get(view.state.value, 0) + 1
        if follower.lease.held:
            self._followed.show(engine.worker, follower.state.shown.epoch, seq)
        elif view.state is StreamState.LIVE:
            self._judge_lag(router, engine, follower)
        if view.state is StreamState.SUSPECT:
            self._judge_doubt(router, engine, follower)
        if not view.credited:
            return
        shown = credited(router, engine.worker)
        if view.state is StreamState.SUSPECT:
            self._judge_suspect(router, engine, follower, shown)
            return
        fits: list[LifeSpan] = []
        for span in reversed(engine.spans):
            if self._is_admissible(router, engine, span):
                held = span.life.held(seq)
                if held is not None and all(blocks <= held.get(place, frozenset()) for place, blocks in shown.items()):
                    fits.append(span)
        if shown and not fits and self._loop.time() >= self._excuse_s(router, engine, engine.proven_s) + NEWS_S:
            raise Broken(
                f"credit: {router.name} shows {engine.name} {view.state.value} at seq {seq} with {_count(shown)} blocks, "
                f"{self._ghosts(router, engine, seq, shown)} of which no life held then ({view.reason or 'no reason'})"
            )
        # While a step is unknown that the patch missed, what is shown may be what an earlier life held at this seq.
        is_known = self._loop.time() >= engine.proven_s + NEWS_S
        fits = [span for span in fits if is_known or span is engine.spans[-1]]
        # A plain engine's reader learns of a lost batch only from the next one, and of none before its first.
        if view.state is StreamState.LIVE and fits and engine.kind is not Kind.PLAIN and seq is not None:
            self._judge_age(router, engine, min(self._age_s(router, engine, span, seq) for span in fits), follower)

    def _judge_doubt(self, router: Router, engine: Engine, follower: Follower) -> None:
        key, since_s, now_s = (router.token, engine.worker), follower.state.since_s, self._loop.time()
        if self._doubted.get(key, (None,))[0] != since_s:
            self._doubted[key] = since_s, now_s
        ends_s = max(self._doubted[key][1] + router.config.suspect_credit_s, router.resumed_s) + RESUMED_S
        if follower.state.view.credited and now_s > ends_s:
            raise Broken(
                f"doubt: {router.name} credits {engine.name}, which it has doubted for "
                f"{now_s - self._doubted[key][1]:.1f} s ({follower.state.view.reason})"
            )

    def _judge_suspect(self, router: Router, engine: Engine, follower: Follower, shown: Held) -> None:
        for place, blocks in shown.items():
            left = set(blocks)
            for span in engine.spans:
                for held in span.life.held_after:
                    left -= held.get(place, frozenset())
                    if not left:
                        break
            if left:
                raise Broken(
                    f"credit: {router.name} shows {engine.name} suspect with {len(left)} blocks that no life ever held "
                    f"({follower.state.view.reason})"
                )

    def _judge_age(self, router: Router, engine: Engine, age_s: float, follower: Follower) -> None:
        if age_s > AGE_S:
            raise Broken(
                f"age: {router.name} shows {engine.name} live at seq {follower.state.shown.seq}, {age_s:.1f} s behind"
            )

    def _judge_lag(self, router: Router, engine: Engine, follower: Follower) -> None:
        shown = follower.state.shown
        lag_s = self._followed.lag_s(engine.worker, shown.epoch, shown.seq, router.resumed_s + RESUMED_S)
        self.most_lag_s = max(self.most_lag_s, lag_s)
        if lag_s > LAG_S:
            raise Broken(
                f"staleness: {router.name} shows {engine.name} live at seq {shown.seq}, {lag_s:.1f} s after its follower "
                "showed more"
            )

    def _excuse_s(self, router: Router, engine: Engine, at_s: float = 0.0) -> float:
        """Return the time, not before `at_s`, until which packets, or the router, stood still."""
        return max(at_s, self.deaf_until_s.get(engine.name, 0.0), router.resumed_s + RESUMED_S)

    def _is_admissible(self, router: Router, engine: Engine, span: LifeSpan) -> bool:
        """Return whether the router may still believe that this life has not ended."""
        if span.ended_s is None:
            return True
        heard_s = max(span.ended_s + (DEAF_S if span.silently else 0.0), self._excuse_s(router, engine))
        return self._loop.time() < heard_s + NEWS_S

    def _age_s(self, router: Router, engine: Engine, span: LifeSpan, seq: int | None) -> float:
        """Return how long ago the batch after `seq` was sent.

        If it was dropped on its way, only the next batch shows that, or a check after 10 s without one: the engine's own topic
        has no heartbeats. So a silence does not count until such a check, and nothing shows it if the life ends before the
        next batch. The
        topic of a patched engine is read where the patch did not answer, and a silence counts once its reports are read.
        """
        following = 0 if seq is None else seq + 1
        if following >= len(span.sent_s):
            return 0.0
        sent_s = span.sent_s[following]
        if span.life.patched:
            sent_s = max(sent_s, min(span.idle_s, self._topic_read_s.get(engine.worker, 0.0)))
        else:
            checked_s = max(sent_s, engine.unanswered_s, self._excuse_s(router, engine)) + CHECKED_S
            sent_s = max(sent_s, min(span.idle_s, checked_s if engine.kind is Kind.STOCK else span.idle_s))
            if span.ended_s is not None and span.ended_s - sent_s < LOSS_S:
                return 0.0
        return self._loop.time() - max(sent_s, self._excuse_s(router, engine))

    def _ghosts(self, router: Router, engine: Engine, seq: int | None, shown: Held) -> int:
        numbers = [
            sum(len(blocks - held.get(place, frozenset())) for place, blocks in shown.items())
            for span in engine.spans
            if self._is_admissible(router, engine, span) and (held := span.life.held(seq)) is not None
        ]
        return min(numbers, default=_count(shown))

    def judge_load(self, router: Router) -> None:
        """Check that no sum of load is negative."""
        placer = router.placer
        for view in [] if placer is None else placer.burdens():
            burden = view.burden
            if min(burden.queued_tokens, burden.decode_tokens, burden.requests) < 0:
                raise Broken(f"load: {router.name} counts {burden} for {view.worker.worker_id}")

    def judge_fleet(self) -> None:
        """Check that workers are followed, that all routers hear of them, and that routers agree about the load of each."""
        if problem := self._following.problem() or self._shared_load.problem():
            raise Broken(problem)

    def judge_agreement(self) -> None:
        """Check that routers that show workers as `live` at the same position credit the same blocks and hits."""
        self._asked += 1
        tokens = TOKENS[self._asked % PROMPTS]
        question = Question(MODEL, len(tokens), token_ids=np.array(tokens, np.int64))
        able = [router for router in self._routers if router.answers]
        for engine in self._engines.values():
            shown: dict[tuple[str | None, int | None], tuple[Router, Held, int | None]] = {}
            for router in able:
                assert router.core is not None and router.process is not None
                follower = router.core.registry.followers.get(engine.worker)
                if follower is None or follower.state.view.state is not StreamState.LIVE:
                    continue
                position = follower.state.shown.epoch, follower.state.shown.seq
                hits = {hit.worker: hit.tokens for hit in router.process.run(router.core.ask, question)}
                # Only some routers may know yet that a worker drains, which has no hits then.
                blocks, hit = credited(router, engine.worker), hits.get(engine.worker)
                other, others_blocks, others_hit = shown.setdefault(position, (router, blocks, hit))
                self.agreements += other is not router
                if blocks != others_blocks or (None not in (hit, others_hit) and hit != others_hit):
                    raise Broken(
                        f"agreement: {other.name} and {router.name} show {engine.name} live at seq {position[1]}, with "
                        f"{_count(others_blocks)} and {_count(blocks)} blocks, and hits of {others_hit} and {hit} tokens"
                    )

    def judge_bounds(self, router: Router, tasks: int) -> None:
        """Check the numbers of tasks, sockets and connections."""
        if problem := problem_of_numbers(router, tasks, len(self._engines)):
            raise Broken(problem)

    # -- at the end

    def unfollowed(self) -> str:
        """Return which worker has no follower, or more than one, or ""."""
        for engine in self._engines.values():
            followers = [router.name for router, follower in self._followers_of(engine) if follower.lease.held]
            if len(followers) != 1:
                return f"followers: {engine.name} is followed by {' and '.join(followers) or 'nobody'}"
        return ""

    def uneven(self) -> str:
        """Return which routers' shares of the workers differ by more than one, or "".

        A worker with neither replay nor patch stays with its router.
        """
        if any(engine.kind is Kind.PLAIN for engine in self._engines.values()):
            return ""
        shares = Counter({router.name: 0 for router in self._routers})
        for engine in self._engines.values():
            shares.update(router.name for router, follower in self._followers_of(engine) if follower.lease.held)
        if max(shares.values()) - min(shares.values()) > 1:
            return f"shares: routers follow {dict(shares)} workers"
        return ""

    def _followers_of(self, engine: Engine) -> Iterator[tuple[Router, Follower]]:
        """Yield each live router that knows the engine's worker, and its follower."""
        for router in self._routers:
            follower = None if router.core is None else router.core.registry.followers.get(engine.worker)
            if follower is not None:
                yield router, follower

    def unfinished(self) -> str:
        """Return what is still wrong in the quiet, or ""."""
        for engine in self._engines.values():
            for router in self._routers:
                core = router.core
                follower = None if core is None else core.registry.followers.get(engine.worker)
                if follower is None:
                    return f"followers: {router.name} does not know {engine.name}"
                if (shown := follower.state.view).state is not StreamState.LIVE:
                    return f"followers: {router.name} shows {engine.name} {shown.state.value}: {shown.reason}"
                if problem := self._missing(router, engine, follower):
                    return problem
        if problem := self.unfollowed() or self.uneven():
            return problem
        for router in self._routers:
            if problem := problem_of_gauges(router, len(self._routers)):
                return problem
            for view in [] if router.placer is None else router.placer.burdens():
                burden = view.burden
                if burden.queued_tokens or burden.decode_tokens or burden.requests:
                    return f"load: {router.name} still counts {burden} for {view.worker.worker_id}"
        return ""

    def judge_end(self, reserved: Counter[str], history: Iterable[str]) -> None:
        """Judge what is left of a whole world; see `problem_of_counters` for the arguments."""
        processes = sum(len(router.tokens) for router in self._routers)
        for router in self._routers:
            if problem := problem_of_tables(router, len(self._engines), processes):
                raise Broken(problem)
        if problem := problem_of_counters(self._routers, self._engines, reserved, self.written.logs, history):
            raise Broken(problem)

    def judge_followers(self) -> None:
        """Check that no router keeps what it had of workers that are gone."""
        for router in self._routers:
            if problem := problem_of_followers(router):
                raise Broken(problem)

    def _missing(self, router: Router, engine: Engine, follower: Follower) -> str:
        life, seq = engine.life, follower.state.shown.seq
        if life is None or life.held(seq) is None:
            return f"full credit: {router.name} shows {engine.name} at seq {seq}"
        if engine.kind is Kind.PATCHED:
            full: Held = life.held(seq) or {}
        elif engine.kind is Kind.PLAIN:
            full = life.stored_since(engine.first_quiet)
        else:
            full = life.stored_since(max(life.ring[0][0], life.last_hole + 1))
        shown = credited(router, engine.worker)
        for place, blocks in full.items():
            now = life.now.get(place, frozenset())
            if lost := (blocks & now) - shown.get(place, frozenset()):
                return f"full credit: {router.name} lacks {len(lost)} blocks of {engine.name} at {place.text}"
        return ""


def credited(router: Router, worker: WorkerKey) -> Held:
    """Return the blocks with which a router credits a worker, if its state allows credit."""
    assert router.core is not None
    mirror = router.core.mirror_sync.mirror
    index = mirror.worker(worker)
    held: Held = {}
    for place in () if index is None else index.places:
        hashes = mirror.held(worker, place)
        if len(hashes):
            held[place] = frozenset(hashes.tolist())
    return held


def _count(held: Held) -> int:
    return sum(map(len, held.values()))
