# SPDX-License-Identifier: Apache-2.0
"""Observes requests: the prediction for each, the delivered reuse, and the duration of each step.

The proxy reports each step to a `RequestWatch`. Nothing here decides anything, waits or fails a request. Belongs to one
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from kvrouter.contract.decisions import Outcome
from kvrouter.contract.worker_status import ReuseStatus
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.observe.quality.access_log import list_fields, pieces_of, write_line
from kvrouter.router.observe.quality.answer_tap import AnswerTap, Send
from kvrouter.router.observe.quality.concurrency import Concurrency, Flight
from kvrouter.router.observe.quality.prediction_judge import (
    Doubt,
    DoubtKind,
    PredictionJudge,
    PredictionOutcome,
    PullOutcome,
    outcome_of,
    pull_outcome,
    split_reuse,
)
from kvrouter.router.observe.quality.quality_metrics import QualityMetrics, WorkerQualityMetrics
from kvrouter.router.observe.quality.reuse_report import PullReport, ReuseReport
from kvrouter.router.observe.quality.usage_reader import Usage
from kvrouter.router.route.load.traffic_sums import NO_MODEL, TrafficSums
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.route.tokens.proxied_paths import INFERENCE_PATHS, PROXIED, USAGE_KEY

if TYPE_CHECKING:
    # An extra, which is imported only if traces are wanted.
    from kvrouter.router.observe.quality.tracing import RequestTrace, Tracing

Headers = list[tuple[bytes, bytes]]

OK = "ok"
# The outcomes of requests that failed (`has_failed`).
FAILED_OUTCOMES = frozenset({"server_error", "cut", "unreachable", "bug"})
FIRST_FAILURE = 500
CLIENT_GONE = "client_gone"
# The tokens of the shortest answer that has a time between its tokens.
TOKENS_MIN = 2


def has_failed(outcome: str, refusal_status: int) -> bool:
    """Return whether a request failed. History, decisions and the page all count by this rule.

    A client's mistake (a status below FIRST_FAILURE) and a client that hung up are no failures of the fleet.

    Args:
        outcome: The outcome of the request, one of those in `ProxyMetrics`.
        refusal_status: The status with which the router refused it, or 0 if it did not refuse it.
    """
    return outcome in FAILED_OUTCOMES or refusal_status >= FIRST_FAILURE


class Quality:
    """The accuracy of predictions and the latency of proxied requests, by worker."""

    def __init__(
        self,
        measures: QualityMetrics,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
        decisions: DecisionLog | None = None,
        *,
        traffic: TrafficSums | None = None,
        sums_lists: Callable[[WorkerKey], bool] = lambda worker: False,
        logs_access: bool = False,
    ) -> None:
        """Begin without any observations.

        Args:
            measures: The metrics.
            clock: Returns the time of the clock that `Placer` uses, in seconds.
            tracing: Makes the traces; None: no traces are wanted.
            decisions: Keeps the outcome of each request; None: outcomes are not kept.
            traffic: The sums of each model's traffic, or None to count into sums that are not used.
            sums_lists: Returns whether a worker's engine reports the reuse of a list of prompts as a sum
                (`Engine.sums_cached_tokens`).
            logs_access: Whether each request has its line in the access log.
        """
        self.measures = measures
        self.clock = clock
        self.tracing = tracing
        self.decisions = decisions
        self.traffic = traffic or TrafficSums()
        self.sums_lists = sums_lists
        self.logs_access = logs_access
        self.flights = Concurrency()
        self._predictions: dict[WorkerKey, PredictionJudge] = {}

    def begin(self, path: str, headers: Headers, request_id: str = "", key_name: str | None = None) -> RequestWatch:
        """Begin to observe a request whose body has arrived completely. `key_name` is None if it came without a key."""
        now = self.clock()
        trace = None if self.tracing is None else self.tracing.request(path, headers, now, request_id)
        return RequestWatch(self, now, trace, request_id, path, key_name)

    def of(self, worker: WorkerKey) -> PredictionJudge:
        """Return the judge of the predictions for a worker."""
        judge = self._predictions.get(worker)
        if judge is None:
            judge = self._predictions[worker] = PredictionJudge()
        return judge

    def problem(self, worker: WorkerKey) -> str | None:
        """Return why the predictions for a worker are not to be trusted; None if nothing speaks against them."""
        judge = self._predictions.get(worker)
        return None if judge is None else judge.problem()

    def doubt(self, worker: WorkerKey) -> Doubt | None:
        """Return the problem of a worker's predictions with its kind; None if there is none."""
        judge = self._predictions.get(worker)
        return None if judge is None else judge.doubt()

    def reuse(self, worker: WorkerKey) -> ReuseStatus | None:
        """Return the predicted and delivered tokens of a worker; None if no answer of it was judged."""
        judge = self._predictions.get(worker)
        return None if judge is None else judge.reuse()

    def health(self) -> list[str]:
        """Return a sentence for each worker whose predictions promise too much, or cannot be checked."""
        doubts = ((worker, judge.doubt()) for worker, judge in self._predictions.items())
        return [
            f"worker {printable(worker.route_name)}: {doubt.text}"
            for worker, doubt in doubts
            if doubt is not None and doubt.kind is not DoubtKind.UNFORESEEN
        ]

    def begin_life(self, worker: WorkerKey) -> None:
        """Forget the evidence against a worker's predictions, because another process of its engine may have begun (ADR 22)."""
        judge = self._predictions.get(worker)
        if judge is not None:
            judge.begin_life()

    def on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        """Forget a worker that was dropped; `view` is None then."""
        if view is None:
            self._predictions.pop(worker, None)
            self.flights.forget(worker)


class RequestWatch:
    """One request, from its complete body to the end of its answer.

    Always call `ended`, unless only the beginning of a body was read: then nothing was reported.
    """

    __slots__ = (
        "_began_s",
        "_counted",
        "_flight",
        "_has_salt",
        "_key_name",
        "_life",
        "_list",
        "_measured",
        "_model",
        "_path",
        "_placement",
        "_predicted",
        "_pull",
        "_quality",
        "_question",
        "_report",
        "_request_id",
        "_status",
        "_streams",
        "_tap",
        "_trace",
    )

    def __init__(
        self,
        quality: Quality,
        began_s: float,
        trace: RequestTrace | None,
        request_id: str,
        path: str,
        key_name: str | None,
    ) -> None:
        self._quality = quality
        self._began_s = began_s
        self._request_id = request_id
        self._trace = trace
        self._path = path
        self._key_name = key_name
        self._measured = path in INFERENCE_PATHS
        self._model = NO_MODEL
        # The prompt for the access log; None if the log is off.
        self._question: Question | None = None
        # Whether the hit of the choice predicts the reuse that the engine reports.
        self._predicted = False
        self._has_salt = False
        # Whether the length of the prompt, or of all prompts of a list, is exact.
        self._counted = False
        # The prompts of a list; None for one prompt.
        self._list: Question | None = None
        self._placement: Placement | None = None
        # The pull that the request to the worker names, or None.
        self._pull: PlannedPull | None = None
        # The engine's life in which the worker was chosen, as the judge counts them.
        self._life = 0
        self._flight: Flight | None = None
        self._tap: AnswerTap | None = None
        self._streams = False
        self._status = 0
        self._report: ReuseReport | None = None

    def lookup_ended(self, request: PlacementRequest) -> None:
        """Report that the lookup of the prompt's tokens has ended, with or without tokens."""
        question = request.question
        self._model = question.model
        is_sent = not question.is_guess
        self._counted = is_sent and question.is_counted
        if question.num_prompts == 1:
            # If only the beginning of a prompt is known, more may be reused than can be predicted.
            is_predicted = self._counted
        else:
            self._list = question
            is_predicted = is_sent and bool(question.parts)
        self._predicted = is_predicted and request.is_comparable
        self._has_salt = bool(question.cache_salt)
        if self._quality.logs_access and is_sent:
            self._question = question
        if self._trace is not None:
            self._trace.lookup_ended(request, self._quality.clock())

    def placed(self, placement: Placement) -> None:
        """Report that a worker was chosen."""
        self._placement = placement
        self._pull = None
        placement.is_watched = True
        self._life = self._quality.of(placement.worker).life
        if self._trace is not None:
            self._trace.placed(placement, self._quality.clock())

    def sending(self, worker: WorkerKey, host: str, port: int, headers: Headers) -> Headers:
        """Report that a request to a worker begins, and return the headers that the engine is to get.

        There may be several such requests: one that computes the prompt for another worker, and attempts that fail.
        """
        self._land()
        self._flight = self._quality.flights.begun(worker)
        if self._trace is None:
            return headers
        return self._trace.sending(worker, host, port, headers, self._quality.clock())

    def pulling(self, pull: PlannedPull) -> None:
        """Report that the next request to the chosen worker names the source of a pull."""
        self._pull = pull

    def failed(self, kind: str, text: str) -> None:
        """Report that the request to the worker failed; another attempt or the end follows.

        A repeated call changes nothing.
        """
        self._land()
        self._end_decision(kind)
        if self._trace is not None:
            self._trace.failed(kind, text, self._quality.clock())

    def handed_over(self) -> None:
        """Report that another worker computes the prompt, so that reuse proves nothing about the engine's own cache."""
        self._predicted = self._counted = False

    def tap(self, send: Send, status: int, headers: Headers, *, streams: bool) -> AnswerTap:
        """Report that the answer of the last attempt begins, and return the tap through which it must pass.

        `streams` means that it is a stream of events.
        """
        assert self._placement is not None
        if self._flight is None:
            # The attempt had failed, but its answer is passed on because no other worker has a better one.
            self._flight = self._quality.flights.begun(self._placement.worker)
        self._status, self._streams = status, streams
        encoded = False
        for name, value in headers:
            if name == b"content-encoding":
                encoded = encoded or value.strip().lower() != b"identity"
        proxied = PROXIED.get(self._path)
        self._tap = AnswerTap(
            send,
            self._quality.clock,
            self._flight,
            streams=streams,
            readable=not encoded,
            usage_key=USAGE_KEY if proxied is None else proxied.usage_key,
        )
        return self._tap

    def report(self) -> ReuseReport:
        """Return the facts about reuse and latency. Call it once the answer has passed."""
        if self._report is None:
            self._report = self._made_report()
        return self._report

    def usage(self) -> Usage | None:
        """Return the usage that the answer reports; None if there is none, or no answer."""
        return None if self._tap is None else self.report().usage

    def output_tokens(self) -> int | None:
        """Return the number of generated tokens; None if the answer does not report it."""
        usage = self.usage()
        return None if usage is None else usage.completion_tokens

    def ended(self, outcome: str, refusal_status: int = 0) -> None:
        """Report the end of the request.

        Args:
            outcome: One of those in `ProxyMetrics`.
            refusal_status: The status with which the router refused it, or 0 if it did not refuse it.
        """
        self._land()
        failed = has_failed(outcome, refusal_status)
        self._end_decision(outcome, self._status or refusal_status, failed=failed)
        sums = self._quality.traffic.of(self._model)
        sums.requests += 1
        if failed:
            sums.failed += 1
        if self._quality.logs_access:
            self._write_line(outcome)
        if self._measured and self._tap is not None and self._placement is not None:
            self._count(outcome, self._tap, self._placement)
        if self._trace is not None:
            first_s = None if self._tap is None else self._tap.first_s
            report = None if self._tap is None else self.report()
            self._trace.ended(outcome, self._status, first_s, report, self._quality.clock())

    def _write_line(self, outcome: str) -> None:
        placement, question = self._placement, self._question
        measured = question if self._measured else None
        fields: dict[str, Any] = {
            "request_id": self._request_id,
            "path": self._path,
            # The name of the API key, never the key.
            "key": self._key_name,
            "model": None if question is None else question.model,
            "status": self._status,
            # One of the outcomes that `ProxyMetrics` lists.
            "outcome": outcome,
            "worker": None if placement is None else placement.worker.route_name,
            "selection_id": None if placement is None else placement.selection_id,
            "num_tokens": None if measured is None else measured.num_tokens,
        }
        if measured is not None and measured.num_prompts > 1:
            fields |= list_fields(measured)
        report = None if self._tap is None else self.report()
        e2e_s = self._quality.clock() - self._began_s
        write_line(fields, [] if measured is None else pieces_of(measured), report, e2e_s)

    def _end_decision(self, outcome: str, status: int = 0, *, failed: bool = False) -> None:
        """Record the outcome of the decision.

        Args:
            outcome: The outcome of the request, or the kind of failure of an attempt.
            status: The HTTP status of the answer, or 0 if there was none.
            failed: Whether the request has failed.
        """
        decisions, placement = self._quality.decisions, self._placement
        if decisions is None or placement is None:
            return
        if self._tap is None:
            e2e_s = self._quality.clock() - self._began_s
            result = Outcome(outcome, None, None, None, None, None, e2e_s, status=status or None, failed=failed)
        else:
            report = self.report()
            usage = report.usage
            result = Outcome(
                outcome,
                report.predicted,
                report.delivered,
                None if usage is None else usage.prompt_tokens,
                None if usage is None else usage.completion_tokens,
                report.ttft_s,
                report.e2e_s,
                report.expected,
                status or None,
                failed,
                UNSET if report.pull is None or report.pull.delivered is None else report.pull.delivered,
            )
        decisions.end(placement.selection_id, result)

    def _land(self) -> None:
        if self._flight is not None:
            self._flight.ended()
            self._flight = None

    def _made_report(self) -> ReuseReport:
        tap, placement = self._tap, self._placement
        assert tap is not None and placement is not None
        usage = tap.usage()
        predicted = self._reported_prediction(placement)
        expected = predicted if predicted is None or self._list is not None else placement.expected_tokens
        delivered = None
        if usage is not None:
            judge = self._quality.of(placement.worker)
            same_life = judge.life == self._life
            delivered = judge.delivered_of(usage.cached_tokens, predicted) if same_life else usage.cached_tokens
        pull = None
        if self._pull is not None:
            planned, fetched = self._pull, None
            if predicted is not None and delivered is not None:
                delivered, fetched = split_reuse(delivered, predicted, planned.tokens)
            pull = PullReport(planned.source, max(0, planned.tokens - placement.predicted_tokens), fetched)
        ttft_s = tap.first_s - self._began_s if self._streams and tap.first_s is not None else None
        return ReuseReport(predicted, delivered, usage, ttft_s, self._quality.clock() - self._began_s, expected, pull)

    def _reported_prediction(self, placement: Placement) -> int | None:
        """Return the prediction for what the engine reports as reused; None if there is none that can be compared."""
        if not self._predicted:
            return None
        prompts = self._list
        if prompts is None:
            return placement.predicted_tokens
        if self._quality.sums_lists(placement.worker):
            return placement.predicted_tokens if prompts.is_whole else None
        # In a stream the report is about the prompt whose first token came first, which nobody can predict.
        is_last_reported = prompts.parts[-1].is_whole and not self._streams
        return placement.choice.hit.last_tokens if is_last_reported else None

    def _count(self, outcome: str, tap: AnswerTap, placement: Placement) -> None:
        report, metrics = self.report(), self._quality.measures.of_worker(placement.worker)
        if report.ttft_s is not None and outcome != "server_error":
            metrics.ttft.observe(report.ttft_s)
            self._quality.traffic.of(placement.worker.model).first_token(report.ttft_s)
        # Clients that have read `[DONE]` hang up, some before they have received the end of the body.
        if outcome != OK and not (outcome == CLIENT_GONE and tap.done):
            # The part of an answer that was cut off may have contained its usage.
            return
        metrics.e2e.observe(report.e2e_s)
        completion_tokens = report.usage.completion_tokens if report.usage is not None else None
        if completion_tokens:
            metrics.completion.inc(completion_tokens)
        if self._streams and tap.first_s is not None and placement.sequences == 1:
            # If the engine does not report it, each event counts as one token.
            tokens = completion_tokens or tap.events
            if tokens >= TOKENS_MIN:
                metrics.itl.observe((tap.last_s - tap.first_s) / (tokens - 1))
                metrics.pause.observe(tap.pause_s)
        self._count_prompt(report, placement)
        self._judge(report, tap, placement, metrics)

    def _count_prompt(self, report: ReuseReport, placement: Placement) -> None:
        """Count the prompt of a complete answer, and those of its tokens that were not computed."""
        reused_tokens, usage = report.reused, report.usage
        names: Sequence[int] = placement.prefixes.names
        if placement.sequences > 1:
            # The report covers one prompt or one answer, so the prediction stands for the others.
            names = names if self._list is None else ()
            reused_tokens = placement.predicted_tokens
            if report.predicted is not None and report.delivered is not None:
                reused_tokens += report.delivered - report.predicted
        elif placement.prefilled_at is not None or reused_tokens is None:
            # A decode worker reports tokens as cached that the prefill worker computed, so its report cannot be used.
            is_known = self._predicted or placement.prefilled_at is not None
            reused_tokens = placement.predicted_tokens if is_known else 0
        num_tokens = placement.num_tokens if usage is None else usage.prompt_tokens
        self._quality.traffic.answered(
            placement.prefilled_at or placement.worker,
            names,
            num_tokens,
            max(0, reused_tokens),
        )

    def _count_pull(self, pull: PullReport, placement: Placement) -> None:
        measures, worker = self._quality.measures, placement.worker
        if pull.delivered is None:
            measures.pulls(worker)(PullOutcome.UNKNOWN).inc()
            return
        measures.pulls(worker)(pull_outcome(pull.predicted, pull.delivered)).inc()
        measures.peer_tokens_predicted(worker).inc(pull.predicted)
        measures.peer_tokens_delivered(worker).inc(pull.delivered)

    def _judge(self, report: ReuseReport, tap: AnswerTap, placement: Placement, metrics: WorkerQualityMetrics) -> None:
        quality, measures = self._quality, self._quality.measures
        judge = quality.of(placement.worker)
        # Evidence from another life is about a process that has ended, or about more than one process.
        same_life = judge.life == self._life
        if self._counted and report.usage is not None:
            if same_life:
                judge.counted(placement.num_tokens, report.usage.prompt_tokens)
            if report.usage.prompt_tokens != placement.num_tokens:
                measures.length_mismatches(placement.worker).inc()
        if report.pull is not None:
            self._count_pull(report.pull, placement)
        if report.predicted is None or report.expected is None or report.delivered is None:
            metrics.outcomes[PredictionOutcome.UNJUDGED].inc()
            reason = "several" if placement.sequences > 1 else _unjudged_reason(report, tap)
            measures.unjudged[reason].inc()
            measures.unjudged_former[reason].inc()
            return
        num_tokens = placement.num_tokens
        if self._list is not None and not quality.sums_lists(placement.worker):
            num_tokens = self._list.parts[-1].num_tokens
        judge.sum_up(num_tokens, report.predicted, report.delivered)
        error = report.delivered - report.predicted
        metrics.outcomes[outcome_of(report.predicted, report.delivered)].inc()
        metrics.predicted.inc(report.predicted)
        metrics.expected.inc(report.expected)
        metrics.delivered.inc(report.delivered)
        sums = quality.traffic.of(placement.worker.model)
        sums.predicted_tokens += report.predicted
        sums.delivered_tokens += report.delivered
        errors = measures.errors_of(placement.worker.model)
        errors.prediction.observe(error)
        # The tokens that a source may add make the expectation a range.
        most = (
            report.expected if report.pull is None else max(report.expected, report.predicted + report.pull.predicted)
        )
        errors.expectation.observe(error_of(report.delivered + report.fetched, report.expected, most))
        (metrics.under if error > 0 else metrics.over).inc(abs(error))
        if same_life:
            placement.reused(report.delivered + report.fetched)
        hit = placement.choice.hit
        if same_life and not hit.approximate:
            # The prompts of a list are at the worker at the same time.
            is_alone = tap.was_alone and self._list is None
            judge.judge(report.predicted, report.delivered, alone=is_alone)
            if report.delivered and is_alone and hit.state == StreamState.LIVE and not hit.reason:
                judge.reused(report.predicted, has_salt=self._has_salt)


def error_of(tokens: int, least: int, most: int) -> int:
    """Return how far a number of tokens is below or above a range; 0 within it."""
    return min(0, tokens - least) + max(0, tokens - most)


def _unjudged_reason(report: ReuseReport, tap: AnswerTap) -> str:
    if report.predicted is None:
        return "unpredicted"
    if not tap.readable:
        return "encoded"
    return "no_usage" if report.usage is None else "no_cached_tokens"
