# SPDX-License-Identifier: Apache-2.0
"""Decisions are kept as they were made, found by selection and by request, and bounded in number and bytes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kvrouter.contract.choices import PullReply
from kvrouter.contract.decisions import DecisionReply, Outcome, Proof, Wanted
from kvrouter.contract.fleet_event import EventType
from kvrouter.router.base.common.errors import Saturated
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.observe.decisions import decision_log
from kvrouter.router.observe.decisions.decision import KEPT_CANDIDATES, Decision, KeptChoice
from kvrouter.router.observe.decisions.decision_log import (
    ENTRY_BYTES,
    MAX_ATTEMPTS,
    SHOWN_BURST,
    SHOWN_PER_S,
    DecisionFilter,
    DecisionLog,
)
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.serve.api.decision_reply import decision_reply, list_decisions, read_decision, read_decisions
from tests.support.bare_services import bare_feed
from tests.support.placing_stage import TOKENS, Stage, ask, hit

OUTCOME = Outcome("ok", 64, 48, TOKENS, 5, 0.1, 0.2)
# Outcomes of other kinds, by what differs.
CHANGES: tuple[dict[str, Any], ...] = (
    {"predicted_tokens": 48},
    {"predicted_tokens": None},
    {"delivered_tokens": None},
    {"outcome": "client_gone", "delivered_tokens": None},
    {"outcome": "client_error", "status": 404, "delivered_tokens": None},
    {"outcome": "server_error", "status": 500, "failed": True, "delivered_tokens": None},
    {"outcome": "refused", "status": 503, "failed": True, "predicted_tokens": None, "delivered_tokens": None},
)


class Kept:
    """Stage whose decisions are kept in a decision log."""

    def __init__(self, *hits: Any, max_kept: int = 100, max_bytes: int = 1 << 20, **settings: Any) -> None:
        self.now = 50.0
        self.feed = bare_feed(lambda: 1_000.0)
        metrics = WatchMetrics(MetricRegistry())
        self.log = DecisionLog(max_kept, self.feed, lambda: self.now, metrics, max_bytes)
        self.stage = Stage(*hits, record=self.log.record, **settings)
        self.placer = self.stage.placer

    @property
    def shown(self) -> list[Any]:
        return [entry.event for entry in self.feed._ring.since(0)[0]]


def test_a_reply_of_a_process_that_died_while_it_wrote_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(hit("a", 64))
    result = kept.log.find(kept.placer.reserve(ask()).selection_id)
    assert result is not None
    one, listed = decision_reply(*result), list_decisions(kept.log, 10, DecisionFilter())
    whole, whole_list = msgspec.json.encode(one), msgspec.json.encode(listed)
    assert read_decision(whole) == one and read_decision(whole[: len(whole) // 2]) is None
    cut = whole_list[: len(whole_list) // 2]
    assert read_decisions([cut, whole_list, b"{}"]) == [listed]
    assert caplog.text.count("cannot be read") == 3


def test_a_decision_is_kept_with_everything_that_it_was_based_on() -> None:
    kept = Kept(hit("a", 64), hit("b", 640), hit("c", state="suspect"))
    request = ask(session_id="s", max_tokens=9, exclude_worker_ids=frozenset({"b"}))
    placement = kept.placer.reserve(request)
    result = kept.log.find(placement.selection_id)
    assert result is not None
    reply = decision_reply(*result)
    choice = placement.choice
    assert (reply.worker_id, reply.endpoint, reply.reason) == ("a", "http://a", choice.reason)
    assert (
        reply.overlap.longest_matched == 64
        and reply.effective_prefill_tokens == TOKENS - 64
        and reply.time_s == 1_000.0
    )
    assert (reply.session_id, reply.max_tokens, reply.num_tokens, reply.proof) == ("s", 9, TOKENS, Proof.EXACT)
    assert reply.candidates is not None
    assert [candidate.worker_id for candidate in reply.candidates] == ["a", "c"] and reply.compared == 2
    assert [candidate.state for candidate in reply.candidates] == ["live", "suspect"]
    assert reply.outcome is None and reply.request_id == ""
    # The log does not hold the compared workers as long as the request runs.
    assert choice.comparison is None


def test_the_kept_candidates_are_those_of_explain() -> None:
    """Law: an explanation that is read later equals the one at the time of the choice, for any hits and loads."""
    for seed in range(60):
        rng = random.Random(seed)
        hits = [hit(f"w{i}", rng.randrange(TOKENS), rng.choice(["live", "suspect"])) for i in range(rng.randint(1, 9))]
        kept = Kept(*hits, policy=rng.choice(["kv", "round_robin", "random"]))
        for number in range(rng.randrange(4)):
            kept.placer.reserve(ask(seed=100 + number))
        request = ask(seed=seed)
        question = request.question
        explained = kept.placer.choose(
            type(request)(type(question)(question.model, TOKENS, token_ids=question.token_ids, explain=True)), "now"
        )
        result = kept.log.find("now")
        assert result is not None
        assert result[0].decision().choice.candidates() == explained.candidates
        assert result[0].decision().choice.reason == explained.reason


def test_the_chosen_and_the_cheapest_of_many_workers_are_kept() -> None:
    kept = Kept(*[hit(f"w{i}", i) for i in range(200)])
    placement = kept.placer.reserve(ask())
    result = kept.log.find(placement.selection_id)
    assert result is not None
    choice = result[0].decision().choice
    assert choice.compared == 200 and len(choice.hits) == KEPT_CANDIDATES and choice.hit == placement.choice.hit
    assert choice.costs[1:] == sorted(choice.costs[1:])
    assert [candidate.hit for candidate in choice.candidates()] == choice.hits


def test_a_prompt_that_is_placed_first_and_recorded_later_is_recorded_once() -> None:
    kept = Kept(hit("a"))
    placement, other = (asyncio.run(kept.placer.place(ask(request_id="req"))) for _ in range(2))
    assert kept.log.num_kept == 0
    for _ in range(2):
        placement.record()
    assert kept.log.num_kept == 1 and kept.log.find("req") == kept.log.find(placement.selection_id)
    # Its end comes before the record if it cannot be sent.
    other.done()
    assert kept.log.num_kept == 2


def test_a_request_is_found_by_its_id_with_the_attempts_before() -> None:
    kept = Kept()
    first, second = kept.placer.reserve(ask(0)), kept.placer.reserve(ask(1))
    for placement in (first, second):
        kept.log.name(placement.selection_id, "req")
    kept.log.end(first.selection_id, Outcome("refused", None, None, None, None, None, 0.1))
    kept.log.end(second.selection_id, OUTCOME)
    result = kept.log.find("req")
    assert result is not None
    reply = decision_reply(*result)
    assert (reply.selection_id, reply.earlier, reply.outcome) == (second.selection_id, [first.selection_id], OUTCOME)
    assert kept.log.find(first.selection_id)[0].outcome.outcome == "refused"  # type: ignore[index, union-attr]
    for name in ("", "nobody", "REQ"):
        assert kept.log.find(name) is None


@pytest.mark.parametrize(("tokens", "state", "proof"), [(TOKENS, "live", "exact"), (TOKENS, "suspect", "assumed")])
def test_the_proof_of_a_decision_follows_the_state_of_its_worker(tokens: int, state: str, proof: str) -> None:
    kept = Kept(hit("a", 64, state))
    result = kept.log.find(kept.placer.reserve(ask()).selection_id)
    assert result is not None and decision_reply(*result).proof == proof


PULL = PlannedPull(WorkerKey("m", "b", 1), "10.0.0.7", 5710, tokens=160, fetched_tokens=96, timeout_s=0.25)


def test_a_pull_is_kept_with_the_choice_and_what_it_fetched_with_the_outcome() -> None:
    kept = Kept(hit("a", 64))
    request = ask()
    choice = kept.placer.choose(request, "first")
    assert choice.pull is None and decision_of(kept, "first").pull is None
    kept.log.record("second", request, msgspec.structs.replace(choice, pull=PULL))
    expected = PullReply(worker_id="b", dp_rank=1, tokens=160, fetched_tokens=96, timeout_s=0.25)
    assert decision_of(kept, "second").pull == expected
    kept.log.end("second", msgspec.structs.replace(OUTCOME, fetched_tokens=80))
    ended = decision_of(kept, "second")
    assert ended.pull == expected and ended.outcome is not None and ended.outcome.fetched_tokens == 80


def decision_of(kept: Kept, name: str) -> DecisionReply:
    result = kept.log.find(name)
    assert result is not None
    return decision_reply(*result)


def test_a_decision_from_before_pulls_is_read() -> None:
    kept = Kept(hit("a", 64), hit("b", 640))
    kept.placer.choose(ask(), "s")
    entry = kept.log.find("s")
    assert entry is not None
    fields = msgspec.msgpack.decode(entry[0].data)
    choice = fields[Decision.__struct_fields__.index("choice")]
    hits = choice[KeptChoice.__struct_fields__.index("hits")]
    for values, struct, name in ((choice, KeptChoice, "pull"), *((values, Hit, "pulls") for values in hits)):
        assert struct.__struct_fields__[-1] == name and len(values) == len(struct.__struct_fields__)
        values.pop()
    former = decision_of(kept, "s")
    entry[0].data = msgspec.msgpack.encode(fields)
    assert decision_of(kept, "s") == former


def test_the_oldest_decisions_are_forgotten_first() -> None:
    """Law: the log keeps the newest decisions, within both bounds, and no id leads to a decision that is gone."""
    for seed in range(30):
        rng = random.Random(seed)
        kept = Kept(max_kept=rng.choice([1, 7, 1_000]), max_bytes=rng.choice([2_000, 20_000, 1 << 20]))
        selection_ids = []
        for number in range(60):
            placement = kept.placer.reserve(ask(number))
            kept.log.name(placement.selection_id, f"r{rng.randrange(20)}")
            selection_ids.append(placement.selection_id)
            if rng.random() < 0.3:
                kept.log.end(rng.choice(selection_ids), OUTCOME)
        kept_ids = [selection_id for selection_id in selection_ids if kept.log.find(selection_id)]
        assert kept_ids == selection_ids[len(selection_ids) - len(kept_ids) :] and len(kept_ids) <= kept.log._max_kept
        last, searched = kept.log.last(1_000)
        assert [entry.decision().selection_id for entry in last] == kept_ids[::-1] and searched == kept.log.num_kept
        sizes = sum(len(entry.data) + ENTRY_BYTES for entry in last)
        assert kept.log._bytes == sizes <= kept.log._max_bytes
        for attempts in kept.log._of_request.values():
            assert attempts and set(attempts) <= set(kept_ids) and len(attempts) <= MAX_ATTEMPTS


def test_a_repeated_id_finds_the_later_decision() -> None:
    kept = Kept()
    kept.placer.choose(ask(0), "mine")
    kept.log.name("mine", "req")
    kept.placer.choose(ask(1, tokens=TOKENS // 2), "mine")
    result = kept.log.find("mine")
    assert result is not None and result[0].decision().num_tokens == TOKENS // 2
    assert kept.log.find("req") is None


def test_a_bound_of_0_keeps_no_decision() -> None:
    kept = Kept(max_kept=0)
    assert kept.log.find(kept.placer.reserve(ask()).selection_id) is None
    assert kept.shown, "the stream has them all the same"


def test_text_that_is_no_utf_8_fails_no_choice() -> None:
    kept = Kept(msgspec.structs.replace(hit("a"), reason="\ud800", state="suspect"))
    assert kept.placer.reserve(ask()).worker.worker_id == "a"
    assert kept.shown


def test_a_request_that_is_refused_is_no_decision() -> None:
    kept = Kept(hit("a"), saturation_tokens=1)
    kept.placer.reserve(ask(0))
    with pytest.raises(Saturated):
        kept.placer.reserve(ask(1))
    assert kept.log.num_kept == 1


def test_a_sample_of_decisions_is_published_and_says_how_many_are_not() -> None:
    kept = Kept()
    for number in range(SHOWN_BURST):
        kept.placer.reserve(ask(number))
    assert [event.skipped for event in kept.shown] == [UNSET] * SHOWN_BURST, "what arrives together is shown whole"
    for number in range(100):
        kept.now += 0.1 / SHOWN_PER_S
        kept.placer.reserve(ask(1_000 + number))
    events = kept.shown[SHOWN_BURST:]
    assert all(event.type is EventType.DECISION for event in events) and 9 <= len(events) <= 11
    assert [event.skipped for event in events] == [9] * len(events)
    kept.now += 60
    for number in range(10 * SHOWN_BURST):
        kept.placer.choose(ask(7_000 + number), f"late-{number}")
    # A longer pause earns no more.
    assert len(kept.shown) == 2 * SHOWN_BURST + len(events)


def test_the_outcome_of_a_decision_in_the_stream_follows_it_in_every_process() -> None:
    kept, other = Kept(), Kept()
    kept.log.send_notice = other.log.take_notice
    selection_id = kept.placer.reserve(ask()).selection_id
    kept.log.end(selection_id, msgspec.structs.replace(OUTCOME, status=200))
    for shown in (kept.shown, other.shown):
        decision, outcome = shown
        assert (decision.type, outcome.type) == (EventType.DECISION, EventType.OUTCOME)
        assert (outcome.model, outcome.worker_id, outcome.dp_rank) == (decision.model, decision.worker_id, 0)
        assert (outcome.selection_id, outcome.outcome, outcome.status) == (selection_id, "ok", 200)
        assert (outcome.predicted_tokens, outcome.delivered_tokens) == (64, 48)
        assert (outcome.failed, outcome.e2e_s, outcome.time_s) == (False, 0.2, 1_000.0)


def test_an_outcome_event_leaves_out_numbers_that_are_not_known() -> None:
    kept = Kept()
    kept.log.end(kept.placer.reserve(ask()).selection_id, Outcome("reset", None, None, None, None, None, 0.1))
    assert set(json.loads(msgspec.json.encode(kept.shown[-1]))) == {
        *("type", "time_s", "model", "worker_id", "dp_rank", "selection_id", "outcome", "failed", "e2e_s")
    }


def test_an_outcome_is_an_event_once_and_only_after_an_event_of_its_decision() -> None:
    kept = Kept()
    shown, *_, hidden = [kept.placer.reserve(ask(number)).selection_id for number in range(SHOWN_BURST + 2)]
    for outcome in (OUTCOME, OUTCOME, msgspec.structs.replace(OUTCOME, outcome="cut", failed=True)):
        kept.log.end(hidden, outcome)
        kept.log.end(shown, outcome)
    outcomes = [event for event in kept.shown if event.type is EventType.OUTCOME]
    assert [(event.selection_id, event.outcome) for event in outcomes] == [(shown, "ok"), (shown, "cut")]


def test_a_search_finds_the_wanted_decisions_among_those_that_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the newest decisions that the filter admits are found, and each decision looked at was looked at once."""
    rng = random.Random(5)
    outcomes = [None, OUTCOME, *(msgspec.structs.replace(OUTCOME, **change) for change in CHANGES)]
    kept = Kept(hit("a", 64), hit("b", 640), max_kept=1_000, policy="random")
    for number in range(200):
        kept.placer.choose(ask(number), f"choice-{number}")
        if (outcome := rng.choice(outcomes)) is not None:
            kept.log.end(f"choice-{number}", outcome)
    replies = [decision_reply(entry, explain=False) for entry in kept.log.last(1_000)[0]]
    asserted: dict[Wanted | None, Callable[[DecisionReply], bool]] = {
        None: lambda reply: True,
        Wanted.LOST: lambda reply: bool(reply.lost_by),
        Wanted.FAILED: lambda reply: reply.outcome is not None and reply.outcome.status in (500, 503),
        Wanted.WRONG: lambda reply: (
            reply.outcome is not None and reply.outcome.predicted_tokens == 64 and reply.outcome.delivered_tokens == 48
        ),
    }
    for only, wants in asserted.items():
        for worker, model in ((None, None), ("a", None), ("b", "m"), (None, "m"), ("a", "another")):
            expected = [
                reply.selection_id
                for reply in replies
                if wants(reply) and worker in (None, reply.worker_id) and model in (None, reply.model)
            ]
            entries, searched = kept.log.last(1_000, DecisionFilter(worker, model, only))
            assert [entry.decision().selection_id for entry in entries] == expected and searched == 200
            few = kept.log.last(3, DecisionFilter(worker, model, only))[0]
            assert [entry.decision().selection_id for entry in few] == expected[:3]
        assert any(map(wants, replies)), f"nothing is {only}"
    monkeypatch.setattr(decision_log, "MAX_SEARCHED", 10)
    assert len(kept.log.last(1_000)[0]) == 10 and kept.log.last(1_000, DecisionFilter("another"))[1] == 10
