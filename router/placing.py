# SPDX-License-Identifier: Apache-2.0
"""Places prompts: chooses the worker, counts the load there from that moment on, and makes prompts wait when all are saturated.

Belongs to one asyncio loop. `choose` and `reserve` are synchronous and do no I/O; `place` waits only in the line of the saturated.
Everything that decides is pure (`choose.py`, `load/`); this joins it with the fleet, the clock and the other processes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from kvrouter.router.choose import EXCLUSION, STATE, Choice, Scene, choose
from kvrouter.router.config import Config
from kvrouter.router.errors import NoWorker, RouterError, Saturated, UnknownSelection, UnknownWorker
from kvrouter.router.index.servers import Servers
from kvrouter.router.load.gauges import EngineLoad
from kvrouter.router.load.messages import PREFILL_COMPLETE, RELEASE
from kvrouter.router.load.pending import PENDING_TTL_S, SELECTED_TTL_S, SETTLE_S, PendingPrefixes, names_of
from kvrouter.router.load.sessions import SessionMemory
from kvrouter.router.load.share import LoadShare
from kvrouter.router.load.table import LoadTable
from kvrouter.router.load.waiting import Waiter, WaitingLine
from kvrouter.router.load.weights import Burden, Correction, Weights
from kvrouter.router.metrics import Metrics
from kvrouter.router.names import WorkerKey
from kvrouter.router.policies import policy
from kvrouter.router.printable import printable
from kvrouter.router.question import Hit, Question, asked_for
from kvrouter.router.states import StreamState

log = logging.getLogger("kvrouter.placing")

# How often those in line are looked at even if nothing is heard: engines' own numbers and expiry make room too.
LINE_LOOK_S = 0.05
TICK_S = 1.0
# What a client is told to wait, where no better guess is there, and the bounds of a better one.
RETRY_AFTER_S = 1.0
RETRY_AFTER_MAX_S = 30.0
# Of an answer whose length is not known: half of it is there on average while it is decoded.
USUAL_OUTPUT_TOKENS = 512
DOWN = StreamState.DOWN.value


class Fleet(Protocol):
    """What is asked of the core."""

    def hits(self, question: Question) -> Sequence[Hit]:
        """One hit for each worker of the model. Raises UnknownModel."""
        ...

    def url(self, worker: WorkerKey) -> str | None: ...

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """The prompt is on its way there."""

    def hash_block_size(self, model: str) -> int: ...

    def workers(self) -> Iterable[WorkerKey]: ...


class Ask(msgspec.Struct, frozen=True):
    """One request. question: a prompt whose tokens are not known has no block hashes and an estimated length; max_tokens: the
    most that is generated, None: not known; pinned: this worker (`w0`, `w0@1`) and no other; selection_id: the client's own."""

    question: Question
    session_id: str | None = None
    max_tokens: int | None = None
    pinned: str | None = None
    selection_id: str | None = None


class Placement:
    """One request's place and its load there. Ends by `done`, or by its expiry."""

    __slots__ = (
        "_placing",
        "choice",
        "names",
        "num_tokens",
        "placed_s",
        "prefilling",
        "queued_s",
        "selection_id",
        "told_s",
        "url",
        "worker",
    )

    def __init__(
        self, placing: Placing, selection_id: str, choice: Choice, names: list[int], num_tokens: int, placed_s: float
    ) -> None:
        self._placing = placing
        self.selection_id = selection_id
        self.worker = choice.hit.worker
        self.url = choice.url
        self.choice = choice
        self.names = names
        self.num_tokens = num_tokens
        self.placed_s = placed_s
        self.queued_s = 0.0
        self.prefilling = True
        # When its first token came.
        self.told_s: float | None = None

    def first_token(self) -> None:
        """Its prefill is over. Once more changes nothing."""
        self._placing.first_token(self)

    def done(self, output_tokens: int | None = None) -> None:
        """All of it is over, well or not. Once more changes nothing."""
        self._placing.done(self, output_tokens)


class WorkerBurden(msgspec.Struct, frozen=True):
    """One worker as `GET /loads` shows it. rates in tokens/s, None: not measured yet."""

    worker: WorkerKey
    burden: Burden
    engine: Correction | None
    prefill_rate: float | None
    decode_rate: float | None


class Placing:
    """Where prompts go. `start` shares the load with other processes; without it, everything works for this one alone."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float],
        rng: random.Random,
        new_id: Callable[[], str],
        unavailable: Callable[[WorkerKey], str | None] = lambda worker: None,
        servers: Servers | None = None,
        process: str = "",
    ) -> None:
        """unavailable: why a worker takes nothing now, None when it may. servers, process: where and under which name load is
        shared."""
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self.new_id = new_id
        self._unavailable = unavailable
        self._table = LoadTable()
        self.weights = Weights(self._table, config.saturation_tokens)
        self._policy = policy(config.policy, config.temperature)
        self._sessions = SessionMemory()
        self._pending = PendingPrefixes()
        self._pending_seed = rng.getrandbits(64)
        self._placements: dict[str, Placement] = {}
        self._turns: dict[str, int] = {}
        self._line: WaitingLine[tuple[Ask, float, asyncio.Future[Placement]]] = WaitingLine(config.queue_size)
        self._looking = False
        self._tasks: list[asyncio.Task[None]] = []
        self._share: LoadShare | None = None
        if servers is not None:
            self._share = LoadShare(
                self.weights,
                servers,
                process=process,
                clock=clock,
                rng=rng,
                end_here=self._end_here,
                changed=self._look_soon,
            )

    def start(self) -> None:
        if self._share is not None:
            self._share.start()
        self._tasks.append(asyncio.get_running_loop().create_task(self._tend()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._share is not None:
            await self._share.stop()

    # -- choosing

    def choose(self, ask: Ask) -> Choice:
        """The worker for this prompt; nothing is reserved. Raises UnknownModel, UnknownWorker, NoWorker.

        Also where all are saturated: the cheapest, and its reason says so."""
        now = self._clock()
        choice, names = self._decide(ask, now)
        self._went(ask, choice, names, now, SELECTED_TTL_S)
        return choice

    def reserve(self, ask: Ask, *, anyway: bool = False) -> Placement:
        """Chooses, and counts the load there from now on. Raises what `choose` raises, Saturated, and Conflict for an id in use.

        anyway: also where all are saturated; the client has decided already."""
        now = self._clock()
        choice, names = self._decide(ask, now)
        if choice.all_saturated and not anyway:
            raise Saturated(
                f"every worker that may take this prompt is saturated (over {self.weights.saturation_tokens} tokens queued, or its "
                "cache full and prompts waiting): try again, or add workers",
                retry_after_s=self._retry_after_s(choice.hit.worker),
            )
        num_tokens, worker = ask.question.num_tokens, choice.hit.worker
        selection_id = ask.selection_id or self.new_id()
        output_tokens = min(ask.max_tokens if ask.max_tokens is not None else USUAL_OUTPUT_TOKENS, USUAL_OUTPUT_TOKENS)
        dropped = self._table.reserve(selection_id, worker, choice.prefill_tokens, num_tokens + output_tokens // 2, now)
        self._forget(dropped, "no_room")
        placement = Placement(self, selection_id, choice, names, num_tokens, now)
        self._placements[selection_id] = placement
        self.weights.typical(choice.prefill_tokens, num_tokens)
        self._went(ask, choice, names, now, PENDING_TTL_S)
        self._metrics.reservations.inc()
        self._touched()
        return placement

    async def place(self, ask: Ask) -> Placement:
        """As `reserve`, and waits in line while all are saturated. Raises QueueFull, and Saturated when its time is over."""
        began_s, model = self._clock(), ask.question.model
        retry_after_s = RETRY_AFTER_S
        if not self._line.waits_for(model):
            try:
                return self._placed(self.reserve(ask), began_s)
            except Saturated as error:
                retry_after_s = error.retry_after_s or RETRY_AFTER_S
        deadline_s = self._config.queue_deadline_s
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        waiter = Waiter(model, ask.question.num_tokens, (ask, began_s, future))
        try:
            self._line.join(waiter, retry_after_s)
        except RouterError:
            self._metrics.queue_refused.labels("full").inc()
            raise
        self._metrics.queue_requests.set(len(self._line))
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                # Served in the very moment in which it ceased to wait.
                if isinstance(error, TimeoutError):
                    return future.result()
                future.result().done()
            if not isinstance(error, TimeoutError):
                raise
        finally:
            self._line.leave(waiter)
            self._metrics.queue_requests.set(len(self._line))
        self._metrics.queue_refused.labels("deadline").inc()
        raise Saturated(
            f"every worker that may take this prompt was saturated for {deadline_s:g} s: try again, add workers, or raise "
            "queue_deadline_s",
            retry_after_s=retry_after_s,
        )

    def _decide(self, ask: Ask, now: float) -> tuple[Choice, list[int]]:
        question = ask.question
        everybody = self._fleet.hits(question)
        wanted = asked_for(everybody, question)
        if ask.pinned is not None:
            wanted = _pinned(everybody, ask.pinned, question.model)
        hits, refusals, unavailable = [], [], self._unavailable
        for hit in wanted:
            why = unavailable(hit.worker)
            if why is None and hit.state != DOWN:
                hits.append(hit)
            else:
                refusals.append(f"{printable(hit.worker.worker_id)}: {why or f'down ({hit.reason})'}")
        if not hits:
            reasons = "; ".join(refusals[:8]) or "all are excluded"
            raise NoWorker(f"no worker of model {question.model!r} can take it: {reasons}", retry_after_s=RETRY_AFTER_S)
        names, step_tokens = names_of(question, self._fleet.hash_block_size(question.model), self._pending_seed)
        session = self._sessions.find(question.model, ask.session_id, now) if ask.session_id else None
        scene = Scene(
            num_tokens=question.num_tokens,
            weights=self.weights,
            pending=self._pending.tokens(names, step_tokens, question.num_tokens, now),
            session=session,
            policy=self._policy,
            turn=self._turns.get(question.model, 0),
            blind=question.token_ids is None and (question.block_hashes is None or not len(question.block_hashes)),
        )
        choice = choose(hits, scene, self._rng, explain=question.explain)
        self._count_losses(choice, everybody, wanted)
        return msgspec.structs.replace(choice, url=self._fleet.url(choice.hit.worker)), names

    def _count_losses(self, choice: Choice, everybody: Sequence[Hit], wanted: Sequence[Hit]) -> None:
        """Tokens that the best worker of all would have reused, and this one does not, with the reason of each."""
        metrics = self._metrics
        best = max(hit.disk for hit in everybody)
        if best == 0:
            return
        best_wanted = best if wanted is everybody else max(hit.disk for hit in wanted)
        metrics.achievable_hit_tokens.inc(best)
        metrics.chosen_hit_tokens.inc(choice.hit.disk)
        for reason, tokens in (
            (EXCLUSION, best - best_wanted),
            (STATE, best_wanted - choice.best_hit_tokens),
            (choice.lost, choice.best_hit_tokens - choice.hit.disk),
        ):
            if tokens > 0:
                metrics.lost_hit_tokens.labels(reason).inc(tokens)

    def _went(self, ask: Ask, choice: Choice, names: list[int], now: float, ttl_s: float) -> None:
        worker = choice.hit.worker
        self._turns[worker.model] = self._turns.get(worker.model, 0) + 1
        self._fleet.sent(ask.question, worker)
        self._pending.sent(worker, names, now + ttl_s)
        if ask.session_id:
            self._sessions.went(ask.session_id, worker, ask.question.num_tokens, now)

    def _placed(self, placement: Placement, began_s: float) -> Placement:
        placement.queued_s = placement.placed_s - began_s
        self._metrics.queue_seconds.observe(placement.queued_s)
        return placement

    def _retry_after_s(self, worker: WorkerKey) -> float:
        """Until the worker has done half of what is queued there, as far as its speed is known."""
        drain_s = self.weights.drain_s(worker, self.weights.burden(worker).queued_tokens // 2)
        return RETRY_AFTER_S if drain_s is None else min(max(drain_s, RETRY_AFTER_S), RETRY_AFTER_MAX_S)

    # -- ending

    def first_token(self, placement: Placement) -> None:
        """See `Placement.first_token`."""
        if not placement.prefilling:
            return
        placement.prefilling = False
        now = placement.told_s = self._clock()
        self._table.prefill_done(placement.selection_id)
        self._pending.settle(placement.worker, placement.names, now + SETTLE_S)
        self._learn(placement, now)
        self._freed()

    def done(self, placement: Placement, output_tokens: int | None) -> None:
        """See `Placement.done`."""
        if self._placements.pop(placement.selection_id, None) is None:
            return
        now = self._clock()
        self._table.release(placement.selection_id)
        if placement.prefilling:
            # It may never have come to computing the prefix.
            placement.prefilling = False
            self._pending.settle(placement.worker, placement.names, now)
        elif output_tokens is not None and placement.told_s is not None:
            self.weights.rates_of(placement.worker).decoded(output_tokens - 1, now - placement.told_s)
        self._metrics.reservations_ended.labels("released").inc()
        self._freed()

    def _learn(self, placement: Placement, now: float) -> None:
        hit, choice = placement.choice.hit, placement.choice
        # Where siblings were being computed, or a disk was read, the time is not that of the prompt's own tokens.
        if (
            hit.reason
            or hit.approximate
            or hit.disk > hit.cpu
            or choice.prefill_tokens < placement.num_tokens - hit.disk
        ):
            return
        self.weights.rates_of(placement.worker).first_token(
            placement.num_tokens - hit.disk, hit.cpu - hit.gpu, choice.queued_tokens, now - placement.placed_s
        )

    async def prefill_complete(self, selection_id: str) -> None:
        """The prefill of a reservation of any process is over. Raises UnknownSelection, StoreDown."""
        await self._end(selection_id, PREFILL_COMPLETE)

    async def release(self, selection_id: str) -> None:
        """A reservation of any process is over. Raises UnknownSelection, StoreDown."""
        await self._end(selection_id, RELEASE)

    async def _end(self, selection_id: str, how: str) -> None:
        if self._end_here(selection_id, how):
            return
        if self._share is None or not await self._share.end_elsewhere(selection_id, how):
            raise UnknownSelection(
                f"no reservation {printable(selection_id)!r}: it was released, has expired, or never was made"
            )

    def _end_here(self, selection_id: str, how: str) -> bool:
        placement = self._placements.get(selection_id)
        if placement is None:
            return False
        if how == PREFILL_COMPLETE:
            placement.first_token()
        else:
            placement.done()
        return True

    def _forget(self, selection_ids: Iterable[str], how: str) -> None:
        for selection_id in selection_ids:
            self._placements.pop(selection_id, None)
            self._metrics.reservations_ended.labels(how).inc()

    # -- load

    def engine_said(self, worker: WorkerKey, said: EngineLoad) -> None:
        """An engine told its load to this process."""
        ended = self.weights.engine_said(worker, said, self._clock())
        self._metrics.reservations_voided.inc(ended)
        if self._share is not None:
            self._share.gauge(worker, said)
        self._freed()

    def burdens(self) -> list[WorkerBurden]:
        """All workers, as `GET /loads` shows them."""
        found = []
        for worker in sorted(self._fleet.workers()):
            rates = self.weights.rates.get(worker)
            found.append(
                WorkerBurden(
                    worker,
                    self.weights.burden(worker),
                    self.weights.corrections.get(worker),
                    rates.prefill_rate if rates is not None else None,
                    rates.decode_rate if rates is not None else None,
                )
            )
        return found

    def hash_block_size(self, model: str) -> int:
        """Tokens of a block of the model, 1 while that is not known."""
        return self._fleet.hash_block_size(model)

    def now(self) -> float:
        return self._clock()

    def waiting(self, model: str) -> tuple[int, int]:
        """Prompts in line for a model, and their tokens."""
        return self._line.of(model)

    def health(self) -> list[str]:
        """What is not well about the load."""
        if self._share is None or self._share.problem is None:
            return []
        return [f"the load of other routers is not known ({self._share.problem}): each counts its own alone"]

    def _touched(self) -> None:
        if self._share is not None:
            self._share.touched()

    def _freed(self) -> None:
        self._touched()
        self._look_soon()

    def _look_soon(self) -> None:
        """There may be room: serve the line once all that happens now has happened."""
        if len(self._line) and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        self._line.serve(self._attempt)

    def _attempt(self, waiting: tuple[Ask, float, asyncio.Future[Placement]]) -> bool:
        ask, began_s, future = waiting
        if future.done():
            return True
        try:
            future.set_result(self._placed(self.reserve(ask), began_s))
        except Saturated:
            return False
        except RouterError as error:
            future.set_exception(error)
        return True

    async def _tend(self) -> None:
        tick_s = 0.0
        while True:
            try:
                if len(self._line):
                    self._look()
                if self._clock() >= tick_s:
                    tick_s = self._clock() + TICK_S
                    self.tick()
            except Exception:
                # A defect of ours must not end the task unseen: nothing would expire any more.
                self._metrics.internal_errors.labels("placing").inc()
                log.exception("load not tended")
            await asyncio.sleep(LINE_LOOK_S)

    def tick(self) -> None:
        """Once in a while: what is too old ends, and the numbers are shown."""
        now = self._clock()
        workers = list(self._fleet.workers())
        self._forget(self._table.expire(now), "expired")
        self.weights.tick(workers, now)
        self._sessions.expire(now)
        self._pending.expire(now)
        if self._share is not None:
            self._share.tick()
        self._touched()
        self._measure(workers)

    def _measure(self, workers: Iterable[WorkerKey]) -> None:
        metrics = self._metrics
        metrics.load_known.set(0 if self._share is not None and self._share.problem is not None else 1)
        metrics.load_routers.set(1 + self._table.others)
        metrics.reservations_held.set(len(self._table))
        for worker in workers:
            burden, label = self.weights.burden(worker), metrics.worker_label(worker)
            metrics.load_queued_tokens.labels(label).set(burden.queued_tokens)
            metrics.load_decode_tokens.labels(label).set(burden.decode_tokens)
            metrics.load_requests.labels(label).set(burden.requests)
            metrics.load_saturated.labels(label).set(burden.saturated)


def _pinned(hits: Sequence[Hit], name: str, model: str) -> Sequence[Hit]:
    """The worker that goes by this name, `w0` or `w0@1`."""
    worker_id, at, rank = name.rpartition("@")
    exact = [hit for hit in hits if hit.worker.worker_id == name]
    if not exact and at and rank.isdecimal():
        exact = [hit for hit in hits if hit.worker.worker_id == worker_id and hit.worker.dp_rank == int(rank)]
    if not exact:
        raise UnknownWorker(
            f"no worker {printable(name)!r} is registered for model {model!r}; GET /workers lists those that are"
        )
    return exact
