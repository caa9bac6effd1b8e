# SPDX-License-Identifier: Apache-2.0
"""Metrics of predictions and latencies. docs/reference/metrics.md describes each."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MODEL, WORKER, MetricRegistry
from kvrouter.router.observe.quality.prediction_judge import PredictionOutcome, PullOutcome

# From a cached prompt on a small model to a queue of minutes.
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# A decode step takes some milliseconds (a small model on a fast GPU) to some hundred (a large batch); a pause may be as
# long as a prefill.
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
# From an embedding to a long answer with reasoning.
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Delivered minus predicted tokens: a block is at least 16, an offloaded chunk some hundred, a whole prompt up to a
# million. 0 has its own bucket: values up to -1 are over-credit, values over 0 under-credit.
ERROR_BUCKETS_TOKENS = (-16_384, -4_096, -1_024, -256, -64, -16, -1, 0, 16, 64, 256, 1_024, 4_096, 16_384)

# Why a prediction cannot be judged.
UNJUDGED_REASONS = (
    "unpredicted",  # the prompt's tokens were not known, or its worker's hits are handed over
    "no_usage",  # a stream without stream_options.include_usage, or an answer that has none
    "no_cached_tokens",  # usage without cached_tokens: the engine runs without --enable-prompt-tokens-details
    "encoded",  # a content-encoding: the bytes are not examined
    "several",  # several prompts or answers, and the router cannot know which one the report is about
)


class WorkerQualityMetrics:
    """The metric children of one worker, kept because finding them costs more than counting."""

    __slots__ = (
        "completion", "delivered", "e2e", "expected", "itl", "outcomes", "over", "pause", "predicted", "ttft", "under",
    )  # fmt: skip

    def __init__(self, measures: QualityMetrics, *labels: str) -> None:
        self.outcomes = {outcome: measures.predictions.labels(*labels, outcome.value) for outcome in PredictionOutcome}
        self.predicted = measures.predicted_tokens.labels(*labels)
        self.expected = measures.expected_tokens.labels(*labels)
        self.delivered = measures.delivered_tokens.labels(*labels)
        self.over = measures.over_credit.labels(*labels)
        self.under = measures.under_credit.labels(*labels)
        self.completion = measures.completion_tokens.labels(*labels)
        self.ttft = measures.ttft.labels(*labels)
        self.itl = measures.itl.labels(*labels)
        self.pause = measures.pause.labels(*labels)
        self.e2e = measures.e2e.labels(*labels)


class ModelQualityMetrics:
    """One model's distributions of reused tokens minus predicted and minus expected ones."""

    __slots__ = ("expectation", "prediction")

    def __init__(self, measures: QualityMetrics, model: str) -> None:
        self.prediction = measures.error.labels(model)
        self.expectation = measures.expectation_error.labels(model)


class QualityMetrics:
    """The metrics of predictions, latencies and traces."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter, histogram = registry.counter, registry.histogram
        self.of_worker = registry.per_worker(lambda model, worker: WorkerQualityMetrics(self, model, worker))
        self.predictions = counter(
            "predictions_total",
            "Answered requests, by the result of their prediction",
            WORKER,
            outcome=PredictionOutcome,
        )
        self.unjudged = registry.counters(
            "predictions_unjudged_total",
            "Answered requests whose prediction cannot be judged, by reason",
            reason=UNJUDGED_REASONS,
        )
        # The name before 0.2, which dashboards may have; it goes with that version.
        self.unjudged_former = registry.counters(
            "predictions_untold_total",
            "Former name of kvrouter_predictions_unjudged_total",
            reason=UNJUDGED_REASONS,
        )
        self.predicted_tokens = counter(
            "predicted_cached_tokens_total", "Tokens that were predicted to be reused, of judged requests", WORKER
        )
        self.expected_tokens = counter(
            "expected_cached_tokens_total",
            "Tokens that were expected to be reused with what prompts ahead leave, of the same requests",
            WORKER,
        )
        self.delivered_tokens = counter(
            "delivered_cached_tokens_total", "Tokens that engines say were reused, of the same requests", WORKER
        )
        self.over_credit = counter("over_credit_tokens_total", "Tokens predicted and not reused", WORKER)
        self.under_credit = counter("under_credit_tokens_total", "Tokens reused and not predicted", WORKER)
        # Workers that fetch nothing have none of these series.
        self.pulls = registry.worker_counters(
            "peer_pulls_total",
            "Answered requests that named a source of blocks, by what the engine reused of it",
            outcome=PullOutcome,
        )
        self.peer_tokens_predicted = registry.worker_counter(
            "peer_tokens_predicted_total", "Tokens that were to be fetched from a source, of judged requests"
        )
        self.peer_tokens_delivered = registry.worker_counter(
            "peer_tokens_delivered_total",
            "Tokens that engines say were reused beyond their own tiers, of the same requests",
        )
        self.error = histogram(
            "prediction_error_tokens", "Reused less predicted, of each judged request", ERROR_BUCKETS_TOKENS, MODEL
        )
        self.expectation_error = histogram(
            "expectation_error_tokens", "Reused less expected, of the same requests", ERROR_BUCKETS_TOKENS, MODEL
        )
        self.errors_of = registry.per_model(lambda model: ModelQualityMetrics(self, model))
        self.length_mismatches = registry.worker_counter(
            "token_count_mismatches_total", "Prompts whose length the engine counts differently"
        )
        self.completion_tokens = counter("completion_tokens_total", "Generated tokens, as far as reported", WORKER)
        self.ttft = histogram(
            "ttft_seconds", "Streams: from a whole request to the first event", TTFT_BUCKETS_S, WORKER
        )
        self.itl = histogram("itl_seconds", "Streams: mean time between the tokens of an answer", ITL_BUCKETS_S, WORKER)
        self.pause = histogram(
            "itl_max_seconds", "Streams: longest time between two events of an answer", ITL_BUCKETS_S, WORKER
        )
        self.e2e = histogram(
            "e2e_seconds", "From a whole request to the end of a whole, successful answer", E2E_BUCKETS_S, WORKER
        )
        self.spans = counter("trace_spans_total", "Spans of traces, by outcome", "outcome")
