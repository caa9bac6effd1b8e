# SPDX-License-Identifier: Apache-2.0
"""Observes requests: what was predicted for each, what was delivered, and how long each step took.

The proxy reports each step to a `RequestWatch`; nothing here decides anything, waits or fails a request. Belongs to one
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.workers.worker_status import ReuseStatus
from kvrouter.router.observe.decisions.decision import Outcome
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.observe.quality.access_log import pieces_of, write_line
from kvrouter.router.observe.quality.answer_tap import AnswerTap, Send
from kvrouter.router.observe.quality.concurrency import Concurrency, Flight
from kvrouter.router.observe.quality.prediction_judge import Doubt, PredictionJudge, PredictionOutcome, outcome_of
from kvrouter.router.observe.quality.quality_metrics import QualityMetrics, WorkerQualityMetrics
from kvrouter.router.observe.quality.reuse_report import ReuseReport
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.tokens.proxied_paths import INFERENCE_PATHS

if TYPE_CHECKING:
    # An extra: it is imported where traces are wanted.
    from kvrouter.router.observe.quality.tracing import RequestTrace, Tracing

Headers = list[tuple[bytes, bytes]]

OK = "ok"
CLIENT_GONE = "client_gone"
# The shortest answer that has a time between its tokens.
TOKENS_MIN = 2


class Quality:
    """Tracks accuracy and latency of proxied requests. tracing: None where no traces are wanted.

    clock: seconds, that of `Placer`."""

    def __init__(
        self,
        measures: QualityMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
        decisions: DecisionLog | None = None,
        *,
        logs_access: bool = False,
    ) -> None:
        """decisions: keeps what came of each; None: nobody asks. logs_access: whether each has its line in the log."""
        self.measures = measures
        self.clock = clock
        self.tracing = tracing
        self.decisions = decisions
        self.logs_access = logs_access
        self.flights = Concurrency()
        self._predictions: dict[WorkerKey, PredictionJudge] = {}

    def begin(self, path: str, headers: Headers, request_id: str = "") -> RequestWatch:
        """A request whose body is whole."""
        now = self.clock()
        trace = None if self.tracing is None else self.tracing.request(path, headers, now, request_id)
        return RequestWatch(self, now, trace, request_id, path)

    def of(self, worker: WorkerKey) -> PredictionJudge:
        found = self._predictions.get(worker)
        if found is None:
            found = self._predictions[worker] = PredictionJudge()
        return found

    def problem(self, worker: WorkerKey) -> str | None:
        """Why the predictions for a worker are not to be trusted; None where nothing speaks against them."""
        found = self._predictions.get(worker)
        return None if found is None else found.problem()

    def doubt(self, worker: WorkerKey) -> Doubt | None:
        """The same with its kind."""
        found = self._predictions.get(worker)
        return None if found is None else found.doubt()

    def reuse(self, worker: WorkerKey) -> ReuseStatus | None:
        """What was predicted and delivered for a worker; None where no answer of it was judged."""
        found = self._predictions.get(worker)
        return None if found is None else found.reuse()

    def health(self) -> list[str]:
        """The problems of all workers."""
        problems = ((worker, predictions.problem()) for worker, predictions in self._predictions.items())
        return [f"worker {printable(worker.route_name)}: {problem}" for worker, problem in problems if problem]

    def begin_life(self, worker: WorkerKey) -> None:
        """Forget the evidence against a worker's predictions, because another process of its engine may have begun (ADR
        22)."""
        predictions = self._predictions.get(worker)
        if predictions is not None:
            predictions.begin_life()

    def on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        """The core knows something new of `worker`; None: it was dropped."""
        if view is None:
            self._predictions.pop(worker, None)
            self.flights.forget(worker)


class RequestWatch:
    """One request, from its whole body to the end of its answer. `ended` in any case."""

    __slots__ = (
        "_began_s",
        "_flight",
        "_life",
        "_measured",
        "_path",
        "_placement",
        "_predicted",
        "_quality",
        "_question",
        "_request_id",
        "_status",
        "_streams",
        "_tap",
        "_told",
        "_trace",
    )

    def __init__(
        self, quality: Quality, began_s: float, trace: RequestTrace | None, request_id: str, path: str
    ) -> None:
        self._quality = quality
        self._began_s = began_s
        self._request_id = request_id
        self._trace = trace
        self._path = path
        self._measured = path in INFERENCE_PATHS
        # The prompt as the access log names it.
        self._question: Question | None = None
        # Whether the hit of a choice is a prediction of what is reused.
        self._predicted = False
        self._placement: Placement | None = None
        # The engine's life in which the worker was chosen, as the judge counts them.
        self._life = 0
        self._flight: Flight | None = None
        self._tap: AnswerTap | None = None
        self._streams = False
        self._status = 0
        self._told: ReuseReport | None = None

    def asked(self, ask: PlacementRequest) -> None:
        """The lookup of its tokens ended, with or without tokens."""
        question = ask.question
        # Where only the beginning of a prompt is known, more may be reused than can be predicted.
        self._predicted = question.token_ids is not None and len(question.token_ids) == question.num_tokens
        if self._quality.logs_access:
            self._question = question
        if self._trace is not None:
            self._trace.asked(ask, self._quality.clock())

    def placed(self, placement: Placement) -> None:
        """A worker was chosen."""
        self._placement = placement
        self._life = self._quality.of(placement.worker).life
        if self._quality.decisions is not None:
            self._quality.decisions.name(placement.selection_id, self._request_id)
        if self._trace is not None:
            self._trace.placed(placement, self._quality.clock())

    def sending(self, worker: WorkerKey, host: str, port: int, headers: Headers) -> Headers:
        """A request to a worker begins, of which there may be several: one that computes the prompt for another,
        attempts that fail. The client's headers, as the engine is to get them."""
        self._land()
        self._flight = self._quality.flights.begun(worker)
        if self._trace is None:
            return headers
        return self._trace.sending(worker, host, port, headers, self._quality.clock())

    def failed(self, kind: str, text: str) -> None:
        """It failed; another attempt or the end follows. Repeating it changes nothing."""
        self._land()
        self._end_decision(kind)
        if self._trace is not None:
            self._trace.failed(kind, text, self._quality.clock())

    def handed_over(self) -> None:
        """Another worker computes the prompt: what the engine reuses proves nothing about its own cache."""
        self._predicted = False

    def tap(self, send: Send, status: int, headers: Headers, *, streams: bool) -> AnswerTap:
        """The answer of the last attempt begins. streams: it is a stream of events. What it is passed on through."""
        assert self._placement is not None
        if self._flight is None:
            # It had failed, and is the answer since nobody has a better one.
            self._flight = self._quality.flights.begun(self._placement.worker)
        self._status, self._streams = status, streams
        encoded = False
        for name, value in headers:
            if name == b"content-encoding":
                encoded = encoded or value.strip().lower() != b"identity"
        self._tap = AnswerTap(send, self._quality.clock, self._flight, streams=streams, readable=not encoded)
        return self._tap

    def told(self) -> ReuseReport:
        """What is known once the answer has passed."""
        if self._told is None:
            self._told = self._tell()
        return self._told

    def output_tokens(self) -> int | None:
        """Tokens that were generated, where the answer says how many."""
        if self._tap is None or (usage := self.told().usage) is None:
            return None
        return usage.completion_tokens

    def ended(self, outcome: str) -> None:
        """outcome: as in `ProxyMetrics`."""
        self._land()
        self._end_decision(outcome)
        if self._quality.logs_access:
            self._write_line(outcome)
        if self._measured and self._tap is not None and self._placement is not None:
            self._count(outcome, self._tap, self._placement)
        if self._trace is not None:
            first_s = None if self._tap is None else self._tap.first_s
            told = None if self._tap is None else self.told()
            self._trace.ended(outcome, self._status, first_s, told, self._quality.clock())

    def _write_line(self, outcome: str) -> None:
        placement, question = self._placement, self._question
        write_line(
            request_id=self._request_id,
            path=self._path,
            model=None if question is None else question.model,
            status=self._status,
            outcome=outcome,
            worker=None if placement is None else placement.worker,
            selection_id=None if placement is None else placement.selection_id,
            num_tokens=None if question is None or not self._measured else question.num_tokens,
            pieces=pieces_of(question) if question is not None and self._measured else [],
            report=None if self._tap is None else self.told(),
            e2e_s=self._quality.clock() - self._began_s,
        )

    def _end_decision(self, outcome: str) -> None:
        decisions, placement = self._quality.decisions, self._placement
        if decisions is None or placement is None:
            return
        if self._tap is None:
            e2e_s = self._quality.clock() - self._began_s
            ended = Outcome(outcome, None, None, None, None, None, e2e_s)
        else:
            told = self.told()
            usage = told.usage
            ended = Outcome(
                outcome,
                told.predicted,
                told.delivered,
                None if usage is None else usage.prompt_tokens,
                None if usage is None else usage.completion_tokens,
                told.ttft_s,
                told.e2e_s,
                told.expected,
            )
        decisions.end(placement.selection_id, ended)

    def _land(self) -> None:
        if self._flight is not None:
            self._flight.ended()
            self._flight = None

    def _tell(self) -> ReuseReport:
        tap, placement = self._tap, self._placement
        assert tap is not None and placement is not None
        usage = tap.usage()
        predicted = placement.predicted_tokens if self._predicted else None
        expected = placement.expected_tokens if self._predicted else None
        delivered = None
        if usage is not None:
            predictions = self._quality.of(placement.worker)
            same = predictions.life == self._life
            delivered = predictions.delivered_of(usage.cached_tokens, predicted) if same else usage.cached_tokens
        ttft_s = tap.first_s - self._began_s if self._streams and tap.first_s is not None else None
        return ReuseReport(predicted, delivered, usage, ttft_s, self._quality.clock() - self._began_s, expected)

    def _count(self, outcome: str, tap: AnswerTap, placement: Placement) -> None:
        told, children = self.told(), self._quality.measures.of_worker(placement.worker)
        if told.ttft_s is not None and outcome != "server_error":
            children.ttft.observe(told.ttft_s)
        # Clients that have read `[DONE]` hang up, some before the end of the body has come to them.
        if outcome != OK and not (outcome == CLIENT_GONE and tap.done):
            # The part of an answer that was cut off may have contained its usage.
            return
        children.e2e.observe(told.e2e_s)
        completion_tokens = told.usage.completion_tokens if told.usage is not None else None
        if completion_tokens:
            children.completion.inc(completion_tokens)
        if self._streams and tap.first_s is not None:
            # If the engine does not report it, each event counts as one token.
            tokens = completion_tokens or tap.events
            if tokens >= TOKENS_MIN:
                children.itl.observe((tap.last_s - tap.first_s) / (tokens - 1))
                children.pause.observe(tap.pause_s)
        self._judge(told, tap, placement, children)

    def _judge(self, told: ReuseReport, tap: AnswerTap, placement: Placement, children: WorkerQualityMetrics) -> None:
        quality, measures = self._quality, self._quality.measures
        predictions = quality.of(placement.worker)
        # Evidence from another life is about a process that has ended, or about none alone.
        same = predictions.life == self._life
        if self._predicted and told.usage is not None:
            if same:
                predictions.counted(placement.num_tokens, told.usage.prompt_tokens)
            if told.usage.prompt_tokens != placement.num_tokens:
                measures.length_mismatches(placement.worker).inc()
        if told.predicted is None or told.expected is None or told.delivered is None:
            children.outcomes[PredictionOutcome.UNTOLD].inc()
            measures.untold[_untold(told, tap)].inc()
            return
        predictions.sum_up(told.predicted, told.delivered)
        error = told.delivered - told.predicted
        children.outcomes[outcome_of(told.predicted, told.delivered)].inc()
        children.predicted.inc(told.predicted)
        children.expected.inc(told.expected)
        children.delivered.inc(told.delivered)
        errors = measures.errors_of(placement.worker.model)
        errors.prediction.observe(error)
        errors.expectation.observe(told.delivered - told.expected)
        (children.under if error > 0 else children.over).inc(abs(error))
        if same:
            placement.reused(told.delivered)
        if same and not placement.choice.hit.approximate:
            predictions.judge(told.predicted, told.delivered, alone=tap.uncontested)


def _untold(told: ReuseReport, tap: AnswerTap) -> str:
    if told.predicted is None:
        return "unpredicted"
    if not tap.readable:
        return "encoded"
    return "no_usage" if told.usage is None else "no_cached_tokens"
