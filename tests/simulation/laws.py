# SPDX-License-Identifier: Apache-2.0
"""The laws of a fleet. The truth is the engines' own counts; `Broken` names the law, the router and the worker.

After each step of a router, and at each answer:

- *Credit.* What a `live` or `catching_up` worker is credited with was held at the shown seq by the engine's present
  life, or by one whose end the router need not know yet. What a `suspect` one is credited with was held at some time.
- *Age.* A `live` worker misses no batch that was sent `AGE_S` ago. So two routers differ by no more than that.
- *Fence.* Nothing is written to a worker's log by a router that does not have its lease.
- *Load.* No sum is negative.

At the end, `QUIET_S` after the last fault:

- *Followers.* Each worker is followed by exactly one router, and is live in all.
- *Full credit.* Each router credits what patch or replay endpoint can bring, else all since the quiet began.
- *Reservations.* Each ended once, and all sums are zero.
- *Bounds.* No router has more tasks or sockets than its workers need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import LeaseValue
from kvrouter.router.model.workers.stream_state import StreamState
from tests.simulation.engine import Engine, Kind, LifeSpan
from tests.simulation.router import Router
from tests.simulation.store.keyspace import Command
from tests.simulation.store_server import StoreServer
from tests.simulation.virtual_loop import VirtualLoop

Held = dict[Place, frozenset[int]]

# Time from the end of a life to the router's change of state, while packets arrive. Most of it is the time in which
# knowledge of other routers counts without a word of theirs.
NEWS_S = 2.5
# How old a live answer may be: that time, and what a dropped message costs until the next one shows the gap.
AGE_S = 4.0
# ZMQ closes a connection on which nothing arrives after this time (`LinkSettings`: ping_s, ping_answer_s, and a pause).
DEAF_S = 27.0
# A process that stood still may answer once before it looks at its clock.
RESUMED_S = 0.5
# The documented bound of `tests/chaos`.
QUIET_S = 75.0
MOST_TASKS = 40
MOST_TASKS_PER_WORKER = 16
MOST_SOCKETS_PER_WORKER = 4


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
        self.judgements = 0
        # How many answers were judged, by state.
        self.states: dict[str, int] = {}
        self._by_log = {keys.log(engine.worker).encode(): engine.worker for engine in engines}
        self._store = store.store
        self._store.observe(self._judge_write)
        # A law that was broken outside a step; it is raised at the next one.
        self.broken = ""

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
        if core is None:
            return
        for worker, follower in core.registry.followers.items():
            view, shown = follower.state.view, follower.state.shown
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
        if shown and not fits:
            raise Broken(
                f"credit: {router.name} shows {engine.name} {view.state.value} at seq {seq} with {_count(shown)} blocks, "
                f"{self._ghosts(router, engine, seq, shown)} of which no life held then ({view.reason or 'no reason'})"
            )
        # A plain engine's reader learns of a lost batch only from the next one, and of none before its first.
        if view.state is StreamState.LIVE and fits and engine.kind is not Kind.PLAIN and seq is not None:
            self._judge_age(router, engine, min(self._age_s(router, engine, span, seq) for span in fits), follower)

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

    def _excuse_s(self, router: Router, engine: Engine) -> float:
        """Return the time until which packets, or the router, stood still."""
        return max(self.deaf_until_s.get(engine.name, 0.0), router.resumed_s + RESUMED_S)

    def _is_admissible(self, router: Router, engine: Engine, span: LifeSpan) -> bool:
        """Return whether the router may still believe that this life has not ended."""
        if span.ended_s is None:
            return True
        heard_s = max(span.ended_s + (DEAF_S if span.silently else 0.0), self._excuse_s(router, engine))
        return self._loop.time() < heard_s + NEWS_S

    def _age_s(self, router: Router, engine: Engine, span: LifeSpan, seq: int | None) -> float:
        """Return how long ago the batch after `seq` was sent."""
        following = 0 if seq is None else seq + 1
        if following >= len(span.sent_s):
            return 0.0
        return self._loop.time() - max(span.sent_s[following], self._excuse_s(router, engine))

    def _ghosts(self, router: Router, engine: Engine, seq: int | None, shown: Held) -> int:
        numbers = [
            sum(len(blocks - held.get(place, frozenset())) for place, blocks in shown.items())
            for span in engine.spans
            if self._is_admissible(router, engine, span) and (held := span.life.held(seq)) is not None
        ]
        return min(numbers, default=_count(shown))

    def _judge_write(self, client: str, effects: Sequence[Command]) -> None:
        if self._store.has_former:
            # Two primaries have two leases: no fence can hold, and the writes to one of them are lost.
            return
        for words in effects:
            if words[0].upper() != b"XADD" or (worker := self._by_log.get(words[1])) is None or not client:
                continue
            holder = self._store.node.space.values.get(keys.lease(worker).encode())
            token = LeaseValue.token_of(holder) if isinstance(holder, bytes) else None
            writer = next(router for router in self._routers if router.name == client)
            if token not in writer.tokens:
                self.broken = f"fence: {client} wrote to the log of {worker.worker_id}, whose lease {token} has"

    def judge_load(self, router: Router) -> None:
        """Check that no sum of load is negative."""
        placer = router.placer
        for view in [] if placer is None else placer.burdens():
            burden = view.burden
            if min(burden.queued_tokens, burden.decode_tokens, burden.requests) < 0:
                raise Broken(f"load: {router.name} counts {burden} for {view.worker.worker_id}")

    def judge_bounds(self, router: Router, tasks: int) -> None:
        """Check the numbers of tasks and sockets."""
        workers = len(self._engines)
        if tasks > MOST_TASKS + MOST_TASKS_PER_WORKER * workers:
            raise Broken(f"bounds: {router.name} has {tasks} tasks")
        if router.core is not None and len(router.context.open_sockets) > MOST_SOCKETS_PER_WORKER * workers:
            raise Broken(f"bounds: {router.name} has {len(router.context.open_sockets)} sockets")

    # -- at the end

    def unfinished(self) -> str:
        """Return what is still wrong in the quiet, or ""."""
        for engine in self._engines.values():
            followers = []
            for router in self._routers:
                core = router.core
                follower = None if core is None else core.registry.followers.get(engine.worker)
                if follower is None:
                    return f"followers: {router.name} does not know {engine.name}"
                if follower.lease.held:
                    followers.append(router.name)
                if (shown := follower.state.view).state is not StreamState.LIVE:
                    return f"followers: {router.name} shows {engine.name} {shown.state.value}: {shown.reason}"
                if problem := self._missing(router, engine, follower):
                    return problem
            if len(followers) != 1:
                return f"followers: {engine.name} is followed by {' and '.join(followers) or 'nobody'}"
        for router in self._routers:
            for view in [] if router.placer is None else router.placer.burdens():
                burden = view.burden
                if burden.queued_tokens or burden.decode_tokens or burden.requests:
                    return f"load: {router.name} still counts {burden} for {view.worker.worker_id}"
        return ""

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
