# SPDX-License-Identifier: Apache-2.0
"""A pull beside the prediction for the engine's own tiers: in decisions, in the access log, and as a law."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.observe.quality.access_log import LOGGER
from kvrouter.router.observe.quality.prediction_judge import (
    PredictionOutcome,
    PullOutcome,
    outcome_of,
    pull_outcome,
    split_reuse,
)
from kvrouter.router.observe.quality.quality_metrics import QualityMetrics
from kvrouter.router.observe.quality.request_watch import Quality, error_of
from kvrouter.router.route.placement.planned_pull import PlannedPull
from tests.support.placing_stage import ask, hit
from tests.unit.test_decision_log import Kept


def test_a_reported_reuse_is_divided_without_a_rest() -> None:
    for predicted in range(6):
        for with_pull in range(predicted, 8):
            for reported in range(10):
                reuse = split_reuse(reported, predicted, with_pull)
                assert reuse.local + reuse.fetched == reported and 0 <= reuse.fetched <= with_pull - predicted
                local, pulled = outcome_of(predicted, reuse.local), pull_outcome(with_pull - predicted, reuse.fetched)
                assert (local is PredictionOutcome.EXACT) == (predicted <= reported <= with_pull)
                assert (local is PredictionOutcome.LESS) == (reported < predicted)
                assert (pulled is PullOutcome.WHOLE) == (reported >= with_pull or with_pull == predicted)
                assert (error_of(reported, predicted, with_pull) == 0) == (predicted <= reported <= with_pull)


@pytest.mark.parametrize("pulls", [True, False])
def test_a_decision_and_the_access_log_tell_fetched_tokens_from_others(
    pulls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(hit("a", 64))
    measures = QualityMetrics(MetricRegistry())
    quality = Quality(measures, lambda: kept.now, decisions=kept.log, logs_access=True)
    watch, request = quality.begin("/v1/completions", []), ask()
    watch.lookup_ended(request)
    placement = kept.placer.reserve(request)
    watch.placed(placement)
    if pulls:
        watch.pulling(PlannedPull(WorkerKey("m", "b"), "10.0.0.9", 5710, 96, 32, 0.1))
    watch.sending(placement.worker, "h", 1, [])
    cached = 80 if pulls else 64
    usage = {"prompt_tokens": placement.num_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    watch.tap(lambda parts: None, 200, [], streams=False)([json.dumps({"usage": usage}).encode()])
    placement.done()
    with caplog.at_level(logging.INFO, LOGGER):
        watch.ended("ok")
    found = kept.log.find(placement.selection_id)
    assert found is not None and found[0].outcome is not None
    outcome = msgspec.to_builtins(found[0].outcome)
    assert (outcome["predicted_tokens"], outcome["delivered_tokens"]) == (64, 64)
    assert outcome.get("fetched_tokens") == (16 if pulls else None) and ("fetched_tokens" in outcome) == pulls
    (line,) = (vars(record) for record in caplog.records if record.name == LOGGER)
    assert line["delivered_tokens"] == 64
    names = ("kv_source", "peer_tokens_predicted", "peer_tokens_delivered")
    assert [line.get(name) for name in names] == (["b", 32, 16] if pulls else [None] * 3)
    assert any(name in line for name in names) == pulls
