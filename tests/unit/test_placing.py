# SPDX-License-Identifier: Apache-2.0
"""Placing on a clock of the test: the load counted at each moment, the queue, and the reason for each lost token."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.router.base.common.errors import Conflict, NoWorker, QueueFull, Saturated, UnknownSelection, UnknownWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.route.load.load_messages import PREFILL_COMPLETE, RELEASE
from kvrouter.router.route.load.load_table import PREFILL_TTL_S, RESERVATION_TTL_S
from kvrouter.router.route.load.prefix_tree import PENDING_TTL_S, SELECTED_TTL_S, SETTLE_S
from kvrouter.router.route.load.prompts_ahead import ARRIVAL_S
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from tests.support.placing_stage import TOKENS, Stage, ask, hit

PATIENCE_S = 20.0


def name_of(placement: Placement) -> str:
    return placement.worker.worker_id


def test_load_counts_from_the_choice_to_the_first_token_and_to_the_end() -> None:
    stage = Stage(hit("a", 500), hit("b"))
    placement = stage.placer.reserve(ask(max_tokens=100))
    assert (name_of(placement), placement.url, placement.num_tokens) == ("a", "http://a", TOKENS)
    assert stage.load("a") == (TOKENS - 500, TOKENS + 50, 1)
    placement.first_token()
    placement.first_token()
    assert stage.load("a") == (0, TOKENS + 50, 1)
    placement.done()
    placement.done()
    placement.first_token()
    assert stage.load("a") == (0, 0, 0) and not stage.placer.weights.table.loads
    assert stage.counted("reservations_ended_total", how="released") == 1
    assert stage.fleet.went == [WorkerKey("m", "a")]


def test_the_load_moves_to_the_worker_that_serves_in_place_of_the_chosen_one() -> None:
    stage = Stage(hit("a", 500), hit("b", 100))
    placement = stage.placer.reserve(ask(max_tokens=100, keeps_comparison=True))
    comparison = placement.choice.comparison
    assert comparison is not None
    other_hit = comparison.hits[comparison.best()[1]]
    stage.now += 5.0
    placement.served_by(other_hit)
    placement.served_by(other_hit)
    assert (name_of(placement), placement.predicted_tokens) == ("b", 100)
    assert stage.load("a") == (0, 0, 0)
    assert stage.load("b") == (TOKENS - 100, TOKENS + 50, 1)
    placement.first_token()
    # Part of that time passed at the other worker, so it teaches nothing about this worker's speed.
    assert not stage.placer.weights.rates
    placement.done()
    placement.served_by(hit("a"))
    assert stage.load("a") == stage.load("b") == (0, 0, 0)
    assert stage.counted("reservations_ended_total", how="released") == 2


def test_a_choice_whose_end_is_reported_is_a_request_of_the_history() -> None:
    stage = Stage(hit("a", 500))
    placement = stage.placer.reserve(ask())
    assert stage.placer.end_here(placement.selection_id, PREFILL_COMPLETE)
    assert stage.placer.traffic.take()["m"].requests == 0
    assert stage.placer.end_here(placement.selection_id, RELEASE)
    assert not stage.placer.end_here(placement.selection_id, RELEASE)
    sums = stage.placer.traffic.take()["m"]
    assert (sums.requests, sums.prompt_tokens, sums.reused_tokens) == (1, TOKENS, 500)
    (prompt,) = stage.placer.traffic.take_prompts()
    assert prompt.names == placement.prefixes.names and prompt.reused_tokens == 500
    # A request whose answer comes through this router is counted there.
    placement = stage.placer.reserve(ask())
    placement.is_watched = True
    assert stage.placer.end_here(placement.selection_id, RELEASE)
    assert stage.placer.traffic.take()["m"].requests == 0


def test_the_history_has_what_was_possible_and_what_was_chosen_but_no_dry_runs() -> None:
    stage = Stage(hit("a", 500), hit("b", 100))
    stage.placer.reserve(ask(pinned="b"))
    stage.placer.choose(ask(dry_run=True), "dry")
    sums = stage.placer.traffic.take()["m"]
    assert (sums.possible_tokens, sums.chosen_tokens) == (500, 100)
    assert stage.counted("achievable_hit_tokens_total") == 500


def test_a_dry_run_is_neither_recorded_nor_counted_and_nothing_counts_on_it() -> None:
    recorded: list[str] = []
    stage = Stage(hit("a"), hit("b"), hit("c"), hit("d"), record=lambda name, ask, choice: recorded.append(name))
    for _ in range(8):
        choice = stage.placer.choose(ask(dry_run=True), "dry")
        assert {candidate.pending for candidate in choice.candidates} <= {0}
    assert recorded == [] and stage.fleet.went == []
    with pytest.raises(UnknownSelection):
        stage.placer.claim("dry", "m")
    stage.placer.choose(ask(), "sent")
    assert len(stage.fleet.went) == 1


@pytest.mark.parametrize("computes", ["c", "p"], ids=["together", "with prefill workers"])
def test_a_dry_run_changes_no_metric(computes: str) -> None:
    stage = Stage(hit("a", 500), hit("b"), hit(computes, 900), hit("down", 950), unavailable={"down": "it is down"})

    def page() -> list[Any]:
        return [sample for family in stage.metrics.collect() for sample in family.samples]

    placed = stage.placer.choose(ask(), "sent")
    page_before = page()
    dry = stage.placer.choose(ask(dry_run=True), "dry")
    assert dry.best_hit_tokens == placed.best_hit_tokens and page() == page_before
    # A reservation is sent as a request, whatever the client calls it.
    stage.placer.reserve(ask(dry_run=True))
    assert page() != page_before


def test_prompts_spread_as_load_gathers() -> None:
    stage = Stage(hit("a"), hit("b"), hit("c"))
    placed = [name_of(stage.placer.reserve(ask(seed))) for seed in range(9)]
    assert sorted(placed) == sorted("abc" * 3)


def test_a_new_cold_worker_gets_traffic_although_others_have_the_prefix() -> None:
    stage = Stage(hit("warm", 600), hit("cold"))
    placed = [name_of(stage.placer.reserve(ask(seed))) for seed in range(12)]
    assert placed[0] == "warm" and placed.count("cold") >= 2


def test_siblings_of_a_prompt_that_is_being_computed_go_with_it() -> None:
    stage = Stage(hit("a"), hit("b"), hit("c"), hit("d"))
    first = stage.placer.reserve(ask())
    # The engine has reported nothing yet, and the load there is no smaller than elsewhere once the prompt is computed.
    stage.now = 1.0
    first.first_token()
    sibling_hits = [stage.placer.choose(ask()).hit for _ in range(5)]
    assert {sibling_hit.worker for sibling_hit in sibling_hits} == {first.worker} and all(
        sibling_hit.tokens == 0 for sibling_hit in sibling_hits
    )
    # The engine has had the time to report, and reported nothing.
    stage.now += max(SETTLE_S, SELECTED_TTL_S) + 0.1
    assert stage.placer.choose(ask()).prefill_tokens == TOKENS


def test_pending_credit_ends_with_the_events_or_by_itself() -> None:
    def credit(stage: Stage) -> int:
        return TOKENS - stage.placer.choose(ask()).prefill_tokens

    stage = Stage(hit("a"))
    stage.placer.reserve(ask())
    stage.now = PENDING_TTL_S - 0.1
    assert credit(stage) == TOKENS - 1
    stage.now = PENDING_TTL_S + SELECTED_TTL_S
    assert credit(stage) == 0
    # A prompt that failed before its first token left no blocks to rely on.
    stage = Stage(hit("a"))
    stage.placer.reserve(ask()).done()
    assert credit(stage) == 0


def test_a_prompt_expects_what_the_prompts_ahead_of_it_will_leave() -> None:
    stage = Stage(hit("a", 64))
    first = stage.placer.reserve(ask())
    assert (first.predicted_tokens, first.expected_tokens) == (64, 64), "nothing is ahead"
    dry = stage.placer.choose(msgspec.structs.replace(ask(), dry_run=True))
    # The last block has the token that is computed in any case.
    assert (dry.hit.tokens, dry.expected_tokens) == (64, TOKENS - 16)
    assert stage.placer.reserve(ask(1)).expected_tokens == 64, "it has nothing in common with the first"
    second = stage.placer.reserve(ask())
    assert (second.predicted_tokens, second.expected_tokens) == (64, TOKENS - 16)
    # A failed prompt leaves nothing. Once the events of a computed prompt arrive, the hit itself says what is left of
    # it.
    second.done()
    stage.now = 1.0
    first.first_token()
    sibling = msgspec.structs.replace(ask(), dry_run=True)
    assert stage.placer.choose(sibling).expected_tokens == TOKENS - 16
    stage.now += 2 * ARRIVAL_S
    assert stage.placer.choose(sibling).expected_tokens == 64


def test_a_guess_and_unknown_groups_have_no_expectation() -> None:
    stage = Stage(hit("a"), hit("b", 512))
    stage.placer.reserve(msgspec.structs.replace(ask(), pinned="a"))
    stage.fleet.rule = None
    unknown = stage.placer.choose(msgspec.structs.replace(ask(), dry_run=True, pinned="a"))
    assert unknown.expected_tokens == unknown.hit.tokens == 0, "the groups of the worker are not known"
    stage.fleet.rule = ResumeRule(16, None)
    stage.fleet.known = [msgspec.structs.replace(known_hit, approximate=True) for known_hit in stage.fleet.known]
    guess = stage.placer.choose(msgspec.structs.replace(ask(), dry_run=True, pinned="a"))
    assert guess.expected_tokens == guess.hit.tokens == 0, "a guess counts what was sent there already"


def test_delivered_reuse_adjusts_later_expectations() -> None:
    stage = Stage(hit("a"))
    stage.placer.reserve(ask())
    for _ in range(200):
        stage.placer.reserve(ask()).reused(0)
    assert 0 <= stage.placer.reserve(ask()).expected_tokens < TOKENS // 2


def test_another_worker_is_expected_to_reuse_its_own_hit_alone() -> None:
    stage = Stage(hit("a"), hit("b"))
    stage.placer.reserve(msgspec.structs.replace(ask(), pinned="a"))
    moved = stage.placer.reserve(msgspec.structs.replace(ask(), pinned="a"))
    assert moved.expected_tokens == TOKENS - 16
    moved.served_by(hit("b", 128))
    assert (moved.predicted_tokens, moved.expected_tokens) == (128, 128)
    sibling = stage.placer.choose(msgspec.structs.replace(ask(), dry_run=True, pinned="b"))
    assert sibling.expected_tokens == TOKENS - 16, "it is ahead where it is computed"


def test_the_session_comes_back_where_nothing_else_is_known() -> None:
    stage = Stage(*(hit(name) for name in "abcdefgh"))
    unknown = Question("m", 1_000, block_hashes=np.empty(0, np.uint64))
    first = stage.placer.choose(PlacementRequest(unknown, session_id="s"))
    for _ in range(10):
        assert stage.placer.choose(PlacementRequest(unknown, session_id="s")).hit.worker == first.hit.worker
    assert len({stage.placer.choose(PlacementRequest(unknown, session_id=f"s{n}")).hit.worker for n in range(40)}) > 4


def test_pins_and_exclusions_are_kept_and_unavailable_workers_named() -> None:
    stage = Stage(
        hit("a", 900), hit("b", 800), hit("b", 700, rank=1), hit("c", 0, "down"), unavailable={"a": "draining"}
    )
    assert name_of(stage.placer.reserve(ask(1))) == "b"
    assert stage.placer.reserve(ask(2, pinned="b@1")).worker == WorkerKey("m", "b", 1)
    assert name_of(stage.placer.reserve(ask(3, worker_ids=frozenset({"b"})))) == "b"
    with pytest.raises(UnknownWorker):
        stage.placer.reserve(ask(pinned="zz"))
    with pytest.raises(UnknownWorker):
        stage.placer.reserve(ask(worker_ids=frozenset({"zz"})))
    for nobody in (ask(pinned="a"), ask(exclude_worker_ids=frozenset({"b"}))):
        with pytest.raises(NoWorker, match="a: draining") as refused:
            stage.placer.reserve(nobody)
        assert refused.value.retry_after_s
    with pytest.raises(NoWorker, match="all are excluded"):
        stage.placer.reserve(ask(exclude_worker_ids=frozenset({"a", "b", "c"})))


def test_a_key_beyond_its_fair_share_is_named_and_counted() -> None:
    stage = Stage(hit("a"), hit("b"))
    quiet = stage.placer.reserve(ask(1, key_name="quiet"))
    for seed in range(2, 6):
        stage.placer.reserve(ask(seed, key_name="loud"))
    dry = stage.placer.choose(ask(9, key_name="loud", dry_run=True))
    assert "its API key holds 1.6 times its fair part of the memory" in dry.reason
    assert "fair part" not in quiet.choice.reason
    # Count the third and the fourth prompt, at which the key had written 2 of 3 and 3 of 4 parts; a dry run does not
    # count.
    assert stage.counted("prompts_over_share_total") == 2


def test_each_lost_token_has_its_reason() -> None:
    stage = Stage(hit("a", 900), hit("b", 800), hit("c", 100), unavailable={"b": "draining"})
    choice = stage.placer.choose(ask(exclude_worker_ids=frozenset({"a"})))
    assert choice.hit.tokens == 100
    assert stage.counted("achievable_hit_tokens_total") == 900
    assert stage.counted("chosen_hit_tokens_total") == 100
    assert stage.counted("lost_hit_tokens_total", reason="exclusion") == 100
    assert stage.counted("lost_hit_tokens_total", reason="state") == 700
    stage = Stage(hit("a", 600), hit("b"))
    for seed in range(4):
        stage.placer.reserve(ask(seed))
    lost = stage.counted("lost_hit_tokens_total", reason="load")
    assert lost == 600
    assert stage.counted("achievable_hit_tokens_total") == stage.counted("chosen_hit_tokens_total") + lost


def test_unreleased_reservations_expire() -> None:
    stage = Stage(hit("a"))
    stage.placer.reserve(ask())
    stage.now = PREFILL_TTL_S + 0.1
    stage.placer.tick()
    assert stage.load("a")[0] == 0 and stage.load("a")[2] == 1
    stage.now = RESERVATION_TTL_S + 0.1
    stage.placer.tick()
    assert stage.load("a") == (0, 0, 0)
    assert stage.counted("reservations_ended_total", how="expired") == 1
    assert stage.counted("reservations_held") == 0


def test_a_page_of_metrics_shows_what_is_held_now() -> None:
    stage = Stage(hit("a"))
    stage.placer.reserve(ask())
    assert "kvrouter_reservations_held 1.0" in asyncio.run(stage.metrics.own_page()).decode()


def test_a_client_names_its_reservation_once() -> None:
    stage = Stage(hit("a"))
    placement = stage.placer.reserve(ask(selection_id="mine"))
    with pytest.raises(Conflict):
        stage.placer.reserve(ask(selection_id="mine"))
    assert stage.load("a")[2] == 1
    asyncio.run(stage.placer.prefill_complete("mine"))
    asyncio.run(stage.placer.release("mine"))
    assert stage.load("a") == (0, 0, 0)
    placement.done()
    stage.placer.reserve(ask(selection_id="mine"))
    for end in (stage.placer.release, stage.placer.prefill_complete):
        with pytest.raises(UnknownSelection):
            asyncio.run(end("other"))


def test_rates_are_learned_from_placements_and_give_retry_after() -> None:
    stage = Stage(hit("a"), saturation_tokens=3 * TOKENS)
    for seed in range(20):
        placement = stage.placer.reserve(ask(seed))
        stage.now += TOKENS / 100
        placement.first_token()
        stage.now += 2.0
        placement.done(output_tokens=101)
    assert stage.placer.weights.rates[WorkerKey("m", "a")].prefill_rate == pytest.approx(100)
    assert stage.placer.weights.rates[WorkerKey("m", "a")].decode_rate == pytest.approx(50)
    for seed in range(30, 34):
        stage.placer.reserve(ask(seed))
    with pytest.raises(Saturated) as refused:
        stage.placer.reserve(ask(99))
    assert refused.value.retry_after_s == pytest.approx(2 * TOKENS / 100, rel=0.1)


# -- the line


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_prompts_wait_while_all_are_saturated_and_are_served_in_their_order() -> None:
    stage = Stage(hit("a"), saturation_tokens=TOKENS - 1, queue_deadline_s=PATIENCE_S)
    first = await stage.placer.place(ask(0))
    waiting = [asyncio.ensure_future(stage.placer.place(ask(number))) for number in range(1, 4)]
    await settled()
    assert stage.placer.waiting("m") == (3, 3 * TOKENS)
    assert not any(task.done() for task in waiting)
    stage.now = 3.0
    first.first_token()
    await settled()
    assert [task.done() for task in waiting] == [True, False, False]
    assert waiting[0].result().queued_s == 3.0
    # A prompt that comes now stands behind the others, although it may fit.
    late = asyncio.ensure_future(stage.placer.place(ask(9, tokens=16)))
    for number in (0, 1):
        waiting[number].result().done()
        await settled()
    assert all(task.done() for task in waiting) and not late.done()
    waiting[2].result().done()
    await settled()
    assert late.done() and stage.placer.waiting("m") == (0, 0)
    assert stage.counted("queue_seconds_count") == 5


async def test_the_queue_is_bounded_in_length_and_time() -> None:
    stage = Stage(hit("a"), saturation_tokens=TOKENS - 1, queue_size=1, queue_deadline_s=0.5)
    await stage.placer.place(ask(0))
    queued = asyncio.ensure_future(stage.placer.place(ask(1)))
    await settled()
    with pytest.raises(QueueFull) as full:
        await stage.placer.place(ask(2))
    assert full.value.status == 429 and full.value.retry_after_s
    with pytest.raises(Saturated) as tired:
        await queued
    assert tired.value.status == 503 and tired.value.retry_after_s
    assert stage.placer.waiting("m") == (0, 0)
    assert stage.counted("queue_refused_total", reason="full") == 1
    assert stage.counted("queue_refused_total", reason="deadline") == 1
    assert stage.load("a")[2] == 1


async def test_a_client_that_leaves_the_queue_leaves_no_load() -> None:
    stage = Stage(hit("a"), saturation_tokens=TOKENS - 1, queue_deadline_s=PATIENCE_S)
    first = await stage.placer.place(ask(0))
    waiting = [asyncio.ensure_future(stage.placer.place(ask(number))) for number in (1, 2)]
    await settled()
    # The first prompt is cancelled while it waits, and the second at the moment in which it is served.
    waiting[0].cancel()
    await settled()
    first.done()
    stage.placer._line.look()
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert stage.load("a") == (0, 0, 0) and stage.placer.waiting("m") == (0, 0)


async def test_waiting_prompts_learn_that_their_worker_is_gone() -> None:
    stage = Stage(hit("a"), saturation_tokens=TOKENS - 1, queue_deadline_s=PATIENCE_S)
    await stage.placer.place(ask(0))
    waiting = asyncio.ensure_future(stage.placer.place(ask(1)))
    await settled()
    stage.out["a"] = "its circuit breaker is open"
    stage.placer.take_engine_load(WorkerKey("m", "a"), EngineLoad(0, 1))
    await settled()
    with pytest.raises(NoWorker, match="circuit breaker"):
        await waiting


async def test_a_prompt_that_one_worker_alone_can_answer_goes_there_whatever_its_load_and_state() -> None:
    stage = Stage(hit("a"), hit("b"), unavailable={"b": "draining"}, saturation_tokens=TOKENS, queue_deadline_s=0.0)
    for _ in range(3):
        stage.placer.reserve(ask(pinned="b", is_owned=True))
    turn = ask(seed=1, pinned="b", is_owned=True, conversation_tokens=50_000, max_tokens=100)
    queued, held, requests = stage.load("b")
    placement = await stage.placer.place(turn)
    assert name_of(placement) == "b"
    # The worker computes the turn alone, and holds the whole conversation.
    assert stage.load("b") == (queued + TOKENS, held + 50_000 + TOKENS + 50, requests + 1)
    with pytest.raises(NoWorker):
        await stage.placer.place(ask(pinned="b"))
