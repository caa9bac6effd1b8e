# SPDX-License-Identifier: Apache-2.0
"""One meaning of a failed request: the history counts it, its decision has it, and `only=failed` finds it."""

from __future__ import annotations

import random

import pytest

from kvrouter.contract.decisions import Wanted
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.observe.decisions.decision_log import DecisionFilter, DecisionLog
from kvrouter.router.observe.quality.quality_metrics import QualityMetrics
from kvrouter.router.observe.quality.request_watch import Quality, RequestWatch
from tests.support.bare_services import bare_feed
from tests.support.placing_stage import Stage, ask, hit

FAILED = DecisionFilter(only=Wanted.FAILED)


class Desk:
    """A placer, a decision log and a history, which observe the same requests."""

    def __init__(self) -> None:
        registry = MetricRegistry()
        self.log = DecisionLog(1_000, bare_feed(lambda: 1.0), lambda: 1.0, WatchMetrics(registry))
        self.quality = Quality(QualityMetrics(registry), lambda: 1.0, decisions=self.log)
        self.placer = Stage(hit("a"), hit("b"), record=self.log.record).placer
        self.number = 0

    def attempt(self, watch: RequestWatch) -> str:
        """Place the request, and return the id of the selection."""
        self.number += 1
        request = ask(self.number)
        watch.lookup_ended(request)
        placement = self.placer.reserve(request)
        watch.placed(placement)
        return placement.selection_id

    def watch(self) -> RequestWatch:
        return self.quality.begin("/v1/completions", [], "request")

    def failed(self) -> list[str]:
        """Return the selections that `only=failed` finds, after checking that the history counts as many."""
        selection_ids = [entry.decision().selection_id for entry in self.log.last(1_000, FAILED)[0]]
        assert self.quality.traffic.of("m").failed == len(selection_ids)
        return selection_ids


def answer(watch: RequestWatch, status: int) -> None:
    watch.tap(lambda chunks: None, status, [], streams=False)


@pytest.mark.parametrize(
    ("status", "outcome", "refusal_status", "failed"),
    [
        (200, "ok", 0, False),
        (400, "client_error", 0, False),
        (429, "client_error", 0, False),
        (200, "client_gone", 0, False),
        (0, "client_gone", 0, False),
        (0, "refused", 404, False),
        (0, "refused", 503, True),
        (0, "unreachable", 502, True),
        (0, "unreachable", 0, True),
        (500, "server_error", 0, True),
        # The stream of an answer reports a failure of the engine.
        (200, "server_error", 0, True),
        (200, "cut", 0, True),
        (0, "bug", 0, True),
    ],
)
def test_history_and_decisions_count_the_same_requests_as_failed(
    status: int, outcome: str, refusal_status: int, failed: bool
) -> None:
    desk = Desk()
    watch = desk.watch()
    selection_id = desk.attempt(watch)
    if status:
        answer(watch, status)
    watch.ended(outcome, refusal_status)
    assert desk.failed() == [selection_id] * failed
    kept = desk.log.find(selection_id)
    assert kept is not None and kept[0].outcome is not None
    assert (kept[0].outcome.outcome, kept[0].outcome.failed) == (outcome, failed)
    assert kept[0].outcome.status == (status or refusal_status or None)


@pytest.mark.parametrize("kind", ["reset", "cut", "not_sent"])
def test_an_attempt_that_another_worker_makes_good_is_no_failed_request(kind: str) -> None:
    desk = Desk()
    watch = desk.watch()
    first = desk.attempt(watch)
    watch.failed(kind, "it broke")
    desk.attempt(watch)
    answer(watch, 200)
    watch.ended("ok")
    assert desk.failed() == []
    kept = desk.log.find(first)
    assert kept is not None and kept[0].outcome is not None and kept[0].outcome.outcome == kind


def test_a_request_of_which_every_attempt_failed_counts_once_by_its_last_attempt() -> None:
    desk = Desk()
    watch = desk.watch()
    for _ in range(3):
        last = desk.attempt(watch)
        watch.failed("reset", "it broke")
    watch.ended("unreachable", 502)
    assert desk.failed() == [last]


def test_any_mixture_of_requests_is_counted_alike() -> None:
    """Law: the history counts as many failed requests as `only=failed` finds."""
    rng = random.Random(3)
    desk = Desk()
    for _ in range(60):
        watch = desk.watch()
        desk.attempt(watch)
        for _ in range(rng.randrange(3)):
            watch.failed(rng.choice(["reset", "cut", "refused"]), "it broke")
            desk.attempt(watch)
        watch.ended(*rng.choice([("ok", 0), ("client_error", 0), ("cut", 0), ("refused", 400), ("refused", 503)]))
        desk.failed()
    assert desk.failed()
