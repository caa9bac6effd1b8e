# SPDX-License-Identifier: Apache-2.0
"""Decisions are kept as they were made, found by selection and by request, and bounded."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from msgspec import UnsetType

from kvrouter.router.base.common.errors import Saturated
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.fleet_event import EventType
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.observe.decisions.decision import KEPT_CANDIDATES, Outcome
from kvrouter.router.observe.decisions.decision_log import ENTRY_BYTES, MAX_ATTEMPTS, SHOWN_PER_S, DecisionLog
from kvrouter.router.serve.api.decision_reply import Proof, decision_reply
from tests.support.bare_services import bare_feed
from tests.support.placing_stage import TOKENS, Stage, ask, hit

OUTCOME = Outcome("ok", 64, 48, TOKENS, 5, 0.1, 0.2)


class Kept:
    """A stage whose decisions are kept."""

    def __init__(self, *hits: Any, max_kept: int = 100, max_bytes: int = 1 << 20, **settings: Any) -> None:
        self.now = 50.0
        self.feed = bare_feed(lambda: 1_000.0)
        metrics = WatchMetrics(MetricRegistry())
        self.log = DecisionLog(max_kept, self.feed, lambda: self.now, metrics, max_bytes)
        self.stage = Stage(*hits, record=self.log.record, **settings)
        self.placing = self.stage.placing

    @property
    def shown(self) -> list[Any]:
        return [one.event for one in self.feed._ring.since(0)[0]]


def test_a_decision_is_kept_with_all_that_it_rested_on() -> None:
    kept = Kept(hit("a", 64), hit("b", 640), hit("c", state="suspect"))
    request = ask(session_id="s", max_tokens=9, exclude_worker_ids=frozenset({"b"}))
    placement = kept.placing.reserve(request)
    found = kept.log.find(placement.selection_id)
    assert found is not None
    reply = decision_reply(*found)
    choice = placement.choice
    assert (reply.worker_id, reply.endpoint, reply.reason) == ("a", "http://a", choice.reason)
    assert reply.overlap.disk == 64 and reply.effective_prefill_tokens == TOKENS - 64 and reply.time_s == 1_000.0
    assert (reply.session_id, reply.max_tokens, reply.num_tokens, reply.proof) == ("s", 9, TOKENS, Proof.EXACT)
    assert not isinstance(reply.candidates, UnsetType)
    assert [one.worker_id for one in reply.candidates] == ["a", "c"] and reply.compared == 2
    assert [one.state for one in reply.candidates] == ["live", "suspect"]
    assert reply.outcome is None and reply.request_id == ""
    # The workers that were compared are not held as long as the request runs.
    assert choice.comparison is None


def test_what_is_kept_of_the_candidates_is_what_explain_says() -> None:
    """Law: a later answer is the answer of that moment, for any hits and loads."""
    for seed in range(60):
        rng = random.Random(seed)
        hits = [hit(f"w{i}", rng.randrange(TOKENS), rng.choice(["live", "suspect"])) for i in range(rng.randint(1, 9))]
        kept = Kept(*hits, policy=rng.choice(["kv", "round_robin", "random"]))
        for number in range(rng.randrange(4)):
            kept.placing.reserve(ask(seed=100 + number))
        request = ask(seed=seed)
        question = request.question
        explained = kept.placing.choose(
            type(request)(type(question)(question.model, TOKENS, token_ids=question.token_ids, explain=True)), "now"
        )
        found = kept.log.find("now")
        assert found is not None
        assert found[0].decision().choice.candidates() == explained.candidates
        assert found[0].decision().choice.reason == explained.reason


def test_of_many_workers_the_chosen_and_the_cheapest_are_kept() -> None:
    kept = Kept(*[hit(f"w{i}", i) for i in range(200)])
    placement = kept.placing.reserve(ask())
    found = kept.log.find(placement.selection_id)
    assert found is not None
    choice = found[0].decision().choice
    assert choice.compared == 200 and len(choice.hits) == KEPT_CANDIDATES and choice.hit == placement.choice.hit
    assert choice.costs[1:] == sorted(choice.costs[1:])


def test_a_request_is_found_by_its_id_with_the_attempts_before() -> None:
    kept = Kept()
    first, second = kept.placing.reserve(ask(0)), kept.placing.reserve(ask(1))
    for placement in (first, second):
        kept.log.name(placement.selection_id, "req")
    kept.log.end(first.selection_id, Outcome("refused", None, None, None, None, None, 0.1))
    kept.log.end(second.selection_id, OUTCOME)
    found = kept.log.find("req")
    assert found is not None
    reply = decision_reply(*found)
    assert (reply.selection_id, reply.earlier, reply.outcome) == (second.selection_id, [first.selection_id], OUTCOME)
    assert kept.log.find(first.selection_id)[0].outcome.outcome == "refused"  # type: ignore[index, union-attr]
    for name in ("", "nobody", "REQ"):
        assert kept.log.find(name) is None


@pytest.mark.parametrize(("tokens", "state", "proof"), [(TOKENS, "live", "exact"), (TOKENS, "suspect", "assumed")])
def test_the_proof_is_as_good_as_the_state(tokens: int, state: str, proof: str) -> None:
    kept = Kept(hit("a", 64, state))
    found = kept.log.find(kept.placing.reserve(ask()).selection_id)
    assert found is not None and decision_reply(*found).proof == proof


def test_the_oldest_go_first_whatever_the_bound_is() -> None:
    """Law: what is kept is the newest, within both bounds, and no id leads to what is gone."""
    for seed in range(30):
        rng = random.Random(seed)
        kept = Kept(max_kept=rng.choice([1, 7, 1_000]), max_bytes=rng.choice([2_000, 20_000, 1 << 20]))
        made = []
        for number in range(60):
            placement = kept.placing.reserve(ask(number))
            kept.log.name(placement.selection_id, f"r{rng.randrange(20)}")
            made.append(placement.selection_id)
            if rng.random() < 0.3:
                kept.log.end(rng.choice(made), OUTCOME)
        left = [one for one in made if kept.log.find(one)]
        assert left == made[len(made) - len(left) :] and len(left) <= kept.log._max_kept
        assert [one.decision().selection_id for one in kept.log.last(1_000)] == left[::-1]
        sizes = sum(len(one.data) + ENTRY_BYTES for one in kept.log.last(1_000))
        assert kept.log._bytes == sizes <= kept.log._max_bytes
        for attempts in kept.log._of_request.values():
            assert attempts and set(attempts) <= set(left) and len(attempts) <= MAX_ATTEMPTS


def test_an_id_that_is_used_again_means_the_later_decision() -> None:
    kept = Kept()
    kept.placing.choose(ask(0), "mine")
    kept.log.name("mine", "req")
    kept.placing.choose(ask(1, tokens=TOKENS // 2), "mine")
    found = kept.log.find("mine")
    assert found is not None and found[0].decision().num_tokens == TOKENS // 2
    assert kept.log.find("req") is None


def test_nothing_is_kept_where_nothing_is_to_be() -> None:
    kept = Kept(max_kept=0)
    assert kept.log.find(kept.placing.reserve(ask()).selection_id) is None
    assert kept.shown, "the stream has them all the same"


def test_text_that_is_no_utf_8_fails_no_choice() -> None:
    kept = Kept(msgspec.structs.replace(hit("a"), reason="\ud800", state="suspect"))
    assert kept.placing.reserve(ask()).worker.worker_id == "a"
    assert kept.shown


def test_a_request_that_is_refused_is_no_decision() -> None:
    kept = Kept(hit("a"), saturation_tokens=1)
    kept.placing.reserve(ask(0))
    with pytest.raises(Saturated):
        kept.placing.reserve(ask(1))
    assert len(list(kept.log.last(10))) == 1


def test_a_sample_of_decisions_is_published_and_says_how_many_are_not() -> None:
    kept = Kept()
    for number in range(100):
        kept.placing.reserve(ask(number))
        kept.now += 0.1 / SHOWN_PER_S
    shown = kept.shown
    assert all(event.type is EventType.DECISION for event in shown) and 9 <= len(shown) <= 12
    skipped = [event.skipped for event in shown[1:]]
    assert skipped == [9] * len(skipped)
    kept.now += 60
    kept.placing.reserve(ask(7_000))
    kept.placing.reserve(ask(7_001))
    # A pause earns no burst.
    assert len(kept.shown) == len(shown) + 1
