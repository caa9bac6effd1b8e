# SPDX-License-Identifier: Apache-2.0
"""The placement of prompts: chooses the worker, and counts the load there from then until the request ends.

Belongs to one asyncio loop; `choose` and `reserve` are synchronous and do no I/O. `decider.py` decides which worker
gets a prompt, `admission_queue.py` holds prompts while all workers are saturated, and `reservations.py` tracks requests
under way. This module joins them, and shares the load with the other processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from kvrouter.router.base.common.errors import NoWorker, Saturated, UnknownModel, UnknownSelection
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_messages import PREFILL_COMPLETE, RELEASE
from kvrouter.router.route.load.load_sync import LoadSync
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.prompts_ahead import PromptAhead
from kvrouter.router.route.load.traffic_sums import TrafficSums
from kvrouter.router.route.load.worker_load import Correction, LoadModel, WorkerBacklog
from kvrouter.router.route.placement.admission_queue import RETRY_AFTER_S, AdmissionQueue
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.decider import NOBODY, Decider, HitSource
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.placement.reservations import Reservations
from kvrouter.router.route.placement.selections import SELECTION_TTL_S, Selected, Selections

# The number of models whose problems one error names.
MODELS_SHOWN = 8
# The longest Retry-After that is derived from the queue.
RETRY_AFTER_MAX_S = 30.0


class WorkerLoadView(msgspec.Struct, frozen=True):
    """One worker as `GET /loads` shows it."""

    worker: WorkerKey
    burden: WorkerBacklog
    # Whether its engine lends blocks of its CPU tier.
    lends: bool
    engine: Correction | None
    # Tokens a second; None if not measured yet.
    prefill_rate: float | None
    decode_rate: float | None


class Placer:
    """The placement of all prompts of a process.

    It shares its load with other processes from `start` on; without servers, this process works alone.
    """

    def __init__(
        self,
        fleet: HitSource,
        *,
        config: Config,
        metrics: PlacementMetrics,
        clock: Callable[[], float],
        rng: random.Random,
        new_id: Callable[[], str],
        unavailable: Callable[[WorkerKey], str | None] = lambda worker: None,
        prefillers: Callable[[str], frozenset[WorkerKey]] = lambda model: NOBODY,
        record: Callable[[str, PlacementRequest, Choice], None] = lambda selection_id, request, choice: None,
        noticed: Callable[[bytes], None] = lambda notice: None,
        servers: Servers | None = None,
        process: str = "",
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        """Place prompts on the workers of this fleet.

        Args:
            fleet: Source of hits and of the workers' data.
            config: The settings.
            metrics: The metrics of placements.
            clock: Returns the current time.
            rng: Decides between equals.
            new_id: Returns an id for a selection.
            unavailable: Returns why a worker takes no requests now, or None if it does.
            prefillers: Returns the workers of a model that only compute prompts.
            record: Keeps a decision: the selection's id, the request, and the choice with its comparison.
            noticed: Called with each notice that another process sent.
            servers: The Redis servers through which load is shared, or None.
            process: The name of this process among those that share load.
            supervisor: Runs the tasks; None for a new one.
        """
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._record = record
        self.new_id = new_id
        self.weights = LoadModel(LoadTable(), config.saturation_tokens)
        self.traffic = TrafficSums(self.weights.prefill_rate, lambda: self.weights.fleet_rate)
        self._decider = Decider(
            fleet,
            self.weights,
            config=config,
            metrics=metrics,
            traffic=self.traffic,
            rng=rng,
            unavailable=unavailable,
            prefillers=prefillers,
        )
        self._selections = Selections()
        self._reservations = Reservations(
            self.weights,
            self._decider,
            metrics=metrics.load,
            traffic=self.traffic,
            clock=clock,
            changed=self._touched,
            freed=self._freed,
        )
        metrics.before_page(self._measure)
        supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng)
        self._line = AdmissionQueue(self.reserve, self.tick, config, metrics, clock, supervisor)
        self._share: LoadSync | None = None
        if servers is not None:
            self._share = LoadSync(
                self.weights,
                servers,
                process=process,
                clock=clock,
                rng=rng,
                end_here=self._reservations.end,
                changed=self._line.look_soon,
                noticed=noticed,
                supervisor=supervisor,
            )

    def apply(self, config: Config) -> None:
        """Apply the limits that can change at run time. Prompts that wait already keep their deadline."""
        self.weights.saturation_tokens = config.saturation_tokens
        self._decider.apply(config)
        self._line.apply(config)

    def start(self) -> None:
        """Start sharing the load, and placing the prompts that wait."""
        if self._share is not None:
            self._share.start()
        self._line.start()

    async def stop(self) -> None:
        """Stop all tasks."""
        await self._line.stop()
        if self._share is not None:
            await self._share.stop()

    def takers(self, models: Iterable[str]) -> list[WorkerKey]:
        """Return the workers that would take a prompt of any of these models now.

        Raises:
            NoWorker: There are none.
        """
        workers: list[WorkerKey] = []
        problems = []
        for model in models:
            try:
                workers += self._decider.takers(model)
            except (NoWorker, UnknownModel) as error:
                problems.append(error.message)
        if not workers:
            raise NoWorker("; ".join(problems[:MODELS_SHOWN]) or "no worker is registered")
        return workers

    def choose(self, request: PlacementRequest, selection_id: str | None = None) -> Choice:
        """Return the choice of a worker for a prompt, without a reservation.

        If all workers are saturated, the cheapest is chosen, and the choice's reason says so. A dry run is neither kept
        nor counted.

        Args:
            request: The request.
            selection_id: The id under which the choice can be reserved later with `claim`; None if it cannot.

        Raises:
            UnknownModel: No worker serves the model.
            UnknownWorker: The request names a worker that does not exist.
            NoWorker: No worker may take the prompt now.
        """
        now = self._clock()
        choice, prompt = self._decide(request, now)
        choice = self._decider.with_expectation(request.question, choice, prompt, now)
        if request.dry_run:
            return choice
        if selection_id is not None:
            self._record(selection_id, request, choice)
        self._decider.record_choice(request, choice, prompt, now, reserved=False)
        if selection_id is not None:
            kept_choice = choice.alone()
            model, num_tokens, until_s = request.question.model, request.question.num_tokens, now + SELECTION_TTL_S
            selected = Selected(
                model,
                kept_choice,
                prompt.prefixes,
                num_tokens,
                request.max_tokens,
                until_s,
                request.question.num_prompts,
                request.answers,
            )
            self._selections.keep(selection_id, selected)
        return choice

    def reserve(
        self,
        request: PlacementRequest,
        *,
        anyway: bool = False,
        prefill_tokens: int | None = None,
        records_later: bool = False,
    ) -> Placement:
        """Choose a worker for a prompt, and count the load there from now on.

        Args:
            request: The request.
            anyway: Whether to ignore saturation and roles, because the client has already decided. They are ignored as well
                if only one worker can answer.
            prefill_tokens: The tokens to compute according to the client, or None.
            records_later: Whether the caller calls the placement's `record`, before anything else of this loop runs.

        Raises:
            UnknownModel: No worker serves the model.
            UnknownWorker: The request names a worker that does not exist.
            NoWorker: No worker may take the prompt now.
            Saturated: All workers that may take the prompt are saturated.
            Conflict: The id is in use.
        """
        now = self._clock()
        if request.dry_run:
            # A reservation counts as load, so `dry_run` has no meaning for it.
            request = msgspec.structs.replace(request, dry_run=False)
        anyway = anyway or request.is_owned
        choice, prompt = self._decide(request, now, anyway=anyway)
        if choice.all_saturated and not anyway:
            raise Saturated(
                f"every worker that may take this prompt is saturated (over {self.weights.saturation_tokens} tokens queued, or its "
                "cache full and prompts waiting): try again, or add workers",
                retry_after_s=self._retry_after_s(choice.hit.worker),
            )
        if prefill_tokens is not None:
            choice = msgspec.structs.replace(choice, prefill_tokens=prefill_tokens)
        selection_id = request.selection_id or self.new_id()
        question = request.question
        placement = self._reservations.book(
            selection_id,
            choice,
            prompt.prefixes,
            request.conversation_tokens + question.num_tokens,
            request.max_tokens,
            now,
            question.num_prompts,
            request.answers,
        )
        placement.unrecorded = partial(self._record_placement, placement, request, prompt, now)
        if not records_later:
            placement.record()
        return placement

    def _record_placement(
        self, placement: Placement, request: PlacementRequest, prompt: PromptAhead, now: float
    ) -> None:
        """Record a placement for later choices and in the log of decisions, with the reuse that is expected."""
        choice = self._decider.with_expectation(request.question, placement.choice, prompt, now)
        placement.choice = choice if request.question.explain or request.keeps_comparison else choice.alone()
        self._record(placement.selection_id, request, choice)
        self._decider.record_choice(request, choice, prompt, now, reserved=True)

    def claim(self, selection_id: str, model: str | None) -> Placement:
        """Reserve the worker that `choose` chose under this id; this works once.

        Args:
            selection_id: The id of the selection.
            model: The model that the selection must be for, or None for any.

        Raises:
            UnknownSelection: There is no such selection.
            Conflict: The id is in use.
        """
        now = self._clock()
        selected = self._selections.find(selection_id, now)
        worker_gone = selected is None or selected.choice.hit.worker not in self._fleet.workers()
        if selected is None or worker_gone or model not in (None, selected.model):
            raise UnknownSelection(
                f"no selection {printable(selection_id)!r} to reserve: it was already reserved, has expired, was never made at "
                "this process, or its worker is gone; send worker_id and the prompt, or use /select_and_reserve"
            )
        placement = self._reservations.book(
            selection_id,
            selected.choice,
            selected.prefixes,
            selected.num_tokens,
            selected.max_tokens,
            now,
            selected.num_prompts,
            selected.answers,
        )
        self._selections.drop(selection_id)
        self._decider.mark_pending(selected.choice.hit.worker, selected.prefixes, now)
        return placement

    async def place(self, request: PlacementRequest) -> Placement:
        """Choose and reserve as `reserve` does, but wait in line while all workers are saturated.

        The caller calls the placement's `record` before anything else of this loop runs. All errors of `reserve` but
        Saturated are raised as soon as they occur.

        Raises:
            QueueFull: Too many prompts wait already.
            Saturated: No worker had room before the deadline.
        """
        if request.question.is_long:
            await self._fleet.hash_ahead(request.question)
        if request.is_owned:
            # Waiting here would not help: the engine alone decides when it computes the prompt.
            return self.reserve(request, records_later=True)
        return await self._line.place(request)

    def _decide(self, request: PlacementRequest, now: float, *, anyway: bool = False) -> tuple[Choice, PromptAhead]:
        """Decide, and measure how long that took unless it is a dry run."""
        choice, prompt = self._decider.decide(request, now, anyway=anyway)
        if not request.dry_run:
            self._metrics.choice_seconds.observe(self._clock() - now)
        return choice, prompt

    def _retry_after_s(self, worker: WorkerKey) -> float:
        """Return the seconds after which a client should try again.

        By then the worker has done half of its queue, as far as its speed is known.
        """
        drain_s = self.weights.drain_s(worker, self.weights.burden(worker).queued_tokens // 2)
        return RETRY_AFTER_S if drain_s is None else min(max(drain_s, RETRY_AFTER_S), RETRY_AFTER_MAX_S)

    async def prefill_complete(self, selection_id: str) -> None:
        """End the prefill of a reservation of any process.

        Raises:
            UnknownSelection: No process has the reservation.
            StoreDown: Its process could not be determined.
        """
        await self._end(selection_id, PREFILL_COMPLETE)

    async def release(self, selection_id: str) -> None:
        """End a reservation of any process.

        Raises:
            UnknownSelection: No process has the reservation.
            StoreDown: Its process could not be determined.
        """
        await self._end(selection_id, RELEASE)

    def end_here(self, selection_id: str, how: str) -> bool:
        """End a reservation of this process, and return False if it has none of this id.

        Args:
            selection_id: The id of the reservation.
            how: RELEASE, or PREFILL_COMPLETE to end its prefill alone.
        """
        return self._reservations.end(selection_id, how)

    async def _end(self, selection_id: str, how: str) -> None:
        """End a reservation or its prefill, in this process or elsewhere."""
        if self.end_here(selection_id, how):
            return
        if self._share is None or not await self._share.end_elsewhere(selection_id, how):
            raise UnknownSelection(
                f"no reservation {printable(selection_id)!r}: it was released, has expired, or was never made"
            )

    def take_engine_load(self, worker: WorkerKey, report: EngineLoad) -> None:
        """Apply the load that an engine reported to this process."""
        ended = self.weights.take_engine_load(worker, report, self._clock())
        self._metrics.load.voided.inc(ended)
        if self._share is not None:
            self._share.gauge(worker, report)
        self._freed()

    def on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        """Forget a worker that was dropped; `view` is None then."""
        if view is None:
            self.weights.forget(worker)

    def send_notice(self, notice: bytes) -> None:
        """Send a notice to the other processes; it may be dropped."""
        if self._share is not None:
            self._share.send_notice(notice)

    def burdens(self) -> list[WorkerLoadView]:
        """Return all workers as `GET /loads` shows them, in order."""
        views = []
        for worker in sorted(self._fleet.workers()):
            speed = self.weights.rates.get(worker)
            views.append(
                WorkerLoadView(
                    worker,
                    self.weights.burden(worker),
                    self._fleet.peer(worker) is not None,
                    self.weights.corrections.get(worker),
                    speed.prefill_rate if speed is not None else None,
                    speed.decode_rate if speed is not None else None,
                )
            )
        return views

    def decode_tokens(self, worker: WorkerKey) -> int:
        """Return the tokens that a worker holds for the requests that it decodes."""
        return self.weights.burden(worker).decode_tokens

    def hash_block_size(self, model: str) -> int:
        """Return the number of tokens of a block of the model, 1 while that is not known."""
        return self._fleet.hash_block_size(model)

    def now(self) -> float:
        """Return the current time on the clock of the load."""
        return self._clock()

    def waiting(self, model: str) -> tuple[int, int]:
        """Return how many prompts wait for a model, and the sum of their tokens."""
        return self._line.of(model)

    def health(self) -> list[str]:
        """Return the problems of sharing load, for `/health`."""
        if self._share is None or self._share.problem is None:
            return []
        return [f"the load of other routers is not known ({self._share.problem}): each counts its own alone"]

    def _touched(self) -> None:
        """Have changes of the load published soon."""
        if self._share is not None:
            self._share.touched()

    def _freed(self) -> None:
        """Have changes of the load published, and the waiting prompts tried."""
        self._touched()
        self._line.look_soon()

    def tick(self) -> None:
        """Drop old entries, and compare the workers' speeds; called periodically."""
        now = self._clock()
        workers = list(self._fleet.workers())
        self._reservations.expire(now)
        self.weights.tick(workers, now)
        self._decider.expire(now)
        self._fleet.take_pool_sizes()
        self._selections.expire(now)
        if self._share is not None:
            self._share.tick()
        self._touched()

    def _measure(self) -> None:
        """Update the gauges of the load."""
        metrics = self._metrics.load
        metrics.known.set(0 if self._share is not None and self._share.problem is not None else 1)
        metrics.routers.set(1 + self.weights.table.others)
        metrics.held.set(len(self.weights.table))
        for worker in self._fleet.workers():
            burden = self.weights.burden(worker)
            metrics.queued_tokens(worker).set(burden.queued_tokens)
            metrics.decode_tokens(worker).set(burden.decode_tokens)
            metrics.requests(worker).set(burden.requests)
            metrics.lent_tokens(worker).set(burden.lent_tokens)
            metrics.saturated(worker).set(burden.saturated)
