# SPDX-License-Identifier: Apache-2.0
"""Reports of predictions that do not come true, without false alarms, and requests that were alone at a worker."""

from __future__ import annotations

from random import Random

import pytest

from kvrouter.contract.worker_status import ReuseStatus
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.quality.concurrency import Concurrency
from kvrouter.router.observe.quality.prediction_judge import (
    ALONE_MIN,
    ALONE_WINDOW,
    BUSY_MIN,
    COUNTED_MIN,
    SILENT_MIN,
    DoubtKind,
    PredictionJudge,
    PredictionOutcome,
    outcome_of,
)

W0, W1 = WorkerKey("m", "w0", 0), WorkerKey("m", "w1", 0)


def judged(*pairs: tuple[int, int], alone: bool = True) -> PredictionJudge:
    predictions = PredictionJudge()
    for predicted, delivered in pairs:
        predictions.judge(predicted, delivered, alone=alone)
    return predictions


@pytest.mark.parametrize(
    ("delivered", "outcome"),
    [(96, PredictionOutcome.EXACT), (95, PredictionOutcome.LESS), (97, PredictionOutcome.MORE)],
)
def test_a_prediction_is_exact_within_its_block(delivered: int, outcome: PredictionOutcome) -> None:
    assert outcome_of(96, delivered) is outcome


def test_a_rule_that_is_a_block_too_generous_is_found_by_requests_that_were_alone() -> None:
    assert judged(*[(4_096, 4_080)] * (ALONE_MIN - 1)).problem() is None
    problem = judged(*[(4_096, 4_080)] * ALONE_MIN).problem()
    assert problem is not None
    assert problem.startswith("predictions do not come true: less was reused than predicted in 8 of the last 8 ")
    assert "PYTHONHASHSEED" in problem


def test_the_alarm_ends_when_predictions_come_true_again() -> None:
    predictions = judged(*[(96, 0)] * ALONE_WINDOW)
    assert predictions.problem()
    for _ in range(ALONE_WINDOW // 2):
        predictions.judge(96, 96, alone=True)
    assert predictions.problem() is None


def test_more_than_predicted_and_nothing_predicted_are_no_alarm() -> None:
    assert judged(*[(96, 960)] * 100).problem() is None
    assert judged(*[(0, 0)] * 100).problem() is None
    assert judged(*[(0, 960)] * 100, alone=False).problem() is None


def test_an_engine_that_ignores_salts_is_named() -> None:
    judge = PredictionJudge()
    for _ in range(ALONE_MIN):
        assert judge.doubt() is None
        judge.reused(0, has_salt=True)
    doubt = judge.doubt()
    assert doubt is not None and doubt.kind is DoubtKind.UNFORESEEN and "8 of the 8 had a cache_salt" in doubt.text
    judge.begin_life()
    assert judge.doubt() is None


def test_half_of_the_reused_prompts_may_be_unforeseen() -> None:
    judge = PredictionJudge()
    for predicted in [0, 96] * ALONE_WINDOW:
        judge.reused(predicted, has_salt=False)
    assert judge.doubt() is None
    judge.reused(0, has_salt=False)
    assert judge.doubt() is None
    judge.reused(0, has_salt=False)
    assert judge.doubt() is not None


def test_evictions_and_siblings_among_others_are_no_alarm() -> None:
    # This is far worse than measured with 16 clients on caches that are much too small.
    rng = Random(1)
    for _ in range(100):
        predictions = PredictionJudge()
        for _ in range(300):
            luck = rng.random()
            delivered = 512 if luck < 0.4 else 1_024 if luck < 0.6 else 768
            predictions.judge(768, delivered, alone=False)
            # A loss of a few tokens each time does not send prompts to the wrong worker.
        assert predictions.problem() is None
    assert judged(*[(4_096, 4_080)] * 100, alone=False).problem() is None


def test_a_cache_that_loses_most_predictions_is_reported_under_load() -> None:
    assert judged(*[(768, 0)] * (BUSY_MIN - 1), alone=False).problem() is None
    problem = judged(*[(768, 0)] * BUSY_MIN, alone=False).problem()
    assert problem is not None
    assert "evicted before it is used" in problem and "(0 of 24576 tokens)" in problem


def test_an_engine_that_never_reports_reuse_is_named() -> None:
    predictions = PredictionJudge()
    for _ in range(SILENT_MIN):
        assert predictions.problem() is None
        assert predictions.delivered_of(None, 96) is None
    problem = predictions.problem()
    assert problem is not None and "--enable-prompt-tokens-details" in problem
    assert predictions.delivered_of(0, 96) == 0
    assert predictions.problem() is None


def test_an_engine_that_leaves_zeros_out_means_zero() -> None:
    predictions = PredictionJudge()
    assert predictions.delivered_of(None, 0) is None
    assert predictions.delivered_of(64, 64) == 64
    assert predictions.delivered_of(None, 0) == 0
    assert [predictions.delivered_of(None, 96) for _ in range(SILENT_MIN)] == [0] * (SILENT_MIN - 1) + [None]
    assert predictions.delivered_of(None, None) is None


def test_judgements_end_with_the_engines_process_and_the_sums_stay() -> None:
    predictions = judged(*[(96, 0)] * BUSY_MIN)
    for _ in range(SILENT_MIN):
        predictions.delivered_of(None, 96)
        predictions.counted(100, 101)
    predictions.sum_up(100, 96, 0)
    predictions.begin_life()
    assert predictions.problem() is None
    assert predictions.reuse() == ReuseStatus(96, 0, 1, 100)
    next_life = judged()
    next_life.delivered_of(64, 64)
    next_life.begin_life()
    assert next_life.delivered_of(None, 0) is None, "the process before left zeros out; this one may report nothing"


def test_other_token_counts_mean_another_tokenizer() -> None:
    predictions = PredictionJudge()
    for _ in range(COUNTED_MIN - 1):
        predictions.counted(100, 101)
    assert predictions.problem() is None
    predictions.counted(100, 101)
    problem = predictions.problem()
    assert problem is not None and "the last has 101 there and 100 here" in problem
    for _ in range(COUNTED_MIN):
        predictions.counted(100, 100)
    assert predictions.problem() is None


def test_a_request_is_alone_if_no_other_overlaps_until_its_first_token() -> None:
    flights = Concurrency()
    first = flights.begun(W0)
    elsewhere = flights.begun(W1)
    assert first.was_alone and elsewhere.was_alone
    second = flights.begun(W0)
    assert not first.was_alone and not second.was_alone
    first.ended()
    assert not second.was_alone
    second.ended()
    third = flights.begun(W0)
    assert third.was_alone
    flights.forget(W0)
    third.ended()
    assert flights.begun(W0).was_alone
