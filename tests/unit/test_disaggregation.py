# SPDX-License-Identifier: Apache-2.0
"""Prefill workers: when one computes a prompt, the load counted meanwhile, and the reason given otherwise."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.errors import NoWorker, UnknownWorker
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.worker_load import IDLE_GRACE_S, LoadModel
from kvrouter.router.route.placement.candidates import Pin, split_by_role
from kvrouter.router.route.placement.choose import choose
from kvrouter.router.route.placement.cost import ChoiceContext
from kvrouter.router.route.placement.prefill_split import (
    DISTURBED_MAX,
    HANDOVER_TOKENS,
    PrefillOutcome,
    SplitRules,
    with_prefill,
)
from tests.support.placing_stage import Stage, ask, hit

LONG = 8_192
RULES = SplitRules(1_024, 0.2)


def stage_of(*hits: Any, busy: str | None = "d", **settings: Any) -> Stage:
    """Return a stage in which the workers whose names begin with p only compute prompts.

    The worker `busy` runs requests, so that a long prompt would disturb them; with None, no worker does.
    """
    stage = Stage(*(hits or (hit("d"), hit("p"))), **settings)
    if busy is not None:
        occupy(stage, busy)
    return stage


def occupy(stage: Stage, name: str, queued_tokens: int = 0) -> None:
    for number in range(16):
        stage.placer.weights.table.reserve(
            f"running-{name}-{number}", WorkerKey("m", name), queued_tokens // 16, 1_000, stage.now
        )


def decided(stage: Stage) -> dict[str, int]:
    counts = {outcome: int(stage.counted("prefill_decisions_total", outcome=outcome)) for outcome in PrefillOutcome}
    return {outcome: count for outcome, count in counts.items() if count}


def test_without_prefill_workers_nothing_is_decided_and_nothing_counted() -> None:
    stage = stage_of(hit("d"), hit("e"))
    assert stage.placer.reserve(ask(tokens=LONG)).prefill is None and not decided(stage)


def test_a_long_prompt_goes_to_the_prefill_worker_of_a_busy_decode_worker() -> None:
    stage = stage_of()
    before = stage.load("d")
    placement = stage.placer.reserve(ask(tokens=LONG, max_tokens=100))
    assert placement.worker.worker_id == "d" and placement.prefill is not None
    assert (placement.prefill.worker, placement.prefill.url) == (WorkerKey("m", "p"), "http://p")
    assert "computed at p and handed over" in placement.choice.reason
    assert stage.load("p") == (LONG, 0, 1)
    # The decode worker pays for receiving the prompt, and the context will be decoded there.
    assert stage.load("d") == (before[0] + round(0.2 * LONG), before[1] + LONG + 50, before[2] + 1)
    placement.handed_over()
    placement.handed_over()
    assert stage.load("p") == (0, 0, 0) and placement.prefilled_at == WorkerKey("m", "p")
    placement.first_token()
    assert stage.load("d") == (before[0], before[1] + LONG + 50, before[2] + 1)
    placement.done()
    assert stage.load("d") == before
    assert decided(stage) == {"remote": 1}
    assert stage.counted("reservations_total") == stage.counted("reservations_ended_total", how="released") == 2


@pytest.mark.parametrize(
    ("hits", "fields", "outcome"),
    [
        ((hit("d", LONG - 500), hit("p")), {}, "short"),
        ((hit("d", 5_000), hit("p")), {"busy": None}, "cheaper_here"),
        ((hit("d"), hit("p", 0, "down")), {}, "unavailable"),
        ((hit("d"), hit("p")), {"unavailable": {"p": "draining"}}, "unavailable"),
    ],
)
def test_each_reason_against_a_hand_over_is_counted(hits: Any, fields: Any, outcome: str) -> None:
    stage = stage_of(*hits, **fields)
    placement = stage.placer.reserve(ask(tokens=LONG))
    assert (placement.worker.worker_id, placement.prefill) == ("d", None)
    assert decided(stage) == {outcome: 1}


def test_requests_that_cannot_be_handed_over_stay_at_the_decode_worker() -> None:
    stage = stage_of()
    for fields, outcome in (
        ({"exclude_worker_ids": frozenset({"p"})}, "excluded"),
        ({"worker_ids": frozenset({"d"})}, "excluded"),
        ({"pinned": "d"}, "request"),
        ({"may_hand_over": False}, "request"),
    ):
        before = decided(stage).get(outcome, 0)
        assert stage.placer.choose(ask(tokens=LONG, **fields)).prefill is None
        assert decided(stage)[outcome] == before + 1


def test_a_prompt_is_ahead_of_others_where_it_is_computed_and_then_where_it_is_decoded() -> None:
    stage = stage_of()
    first = stage.placer.reserve(ask(tokens=LONG))
    assert first.prefill is not None and first.expected_tokens == first.predicted_tokens == 0
    alone = msgspec.structs.replace(ask(tokens=LONG), dry_run=True, may_hand_over=False)
    assert stage.placer.choose(alone).expected_tokens == 0
    first.handed_over()
    sibling = stage.placer.choose(alone)
    assert (sibling.hit.worker.worker_id, sibling.expected_tokens) == ("d", LONG - 16)


def test_saturated_prefill_workers_get_no_prompt() -> None:
    stage = stage_of(saturation_tokens=2 * LONG)
    occupy(stage, "p", 3 * LONG)
    assert stage.placer.choose(ask(tokens=LONG)).prefill is None
    assert decided(stage) == {"saturated": 1}


def test_the_prefill_worker_with_the_prefix_is_taken_and_its_hit_is_what_is_predicted() -> None:
    stage = stage_of(hit("d", 100), hit("p1"), hit("p2", 4_096), hit("p3", 1_024))
    placement = stage.placer.reserve(ask(tokens=LONG))
    assert placement.prefill is not None and placement.prefill.worker.worker_id == "p2"
    assert placement.predicted_tokens == 4_096 and placement.choice.hit.tokens == 100


def test_siblings_are_handed_over_too_while_the_first_is_computed_elsewhere() -> None:
    stage = stage_of(hit("d1"), hit("d2"), hit("p1"), hit("p2"), busy=None)
    occupy(stage, "d1")
    occupy(stage, "d2")
    first = stage.placer.reserve(ask(tokens=LONG))
    assert first.prefill is not None
    for _ in range(4):
        sibling = stage.placer.choose(ask(tokens=LONG))
        # The prompt is not yet at the decode worker, which would have to compute all of it.
        assert sibling.hit.worker == first.worker
        assert sibling.prefill is not None
    first.handed_over()
    # From now on the prompt counts as being at the decode worker.
    assert stage.placer.choose(ask(tokens=LONG)).prefill is None
    assert decided(stage) == {"remote": 5, "short": 1}


def test_a_failed_prefill_is_looked_for_elsewhere_and_then_done_by_the_decode_worker() -> None:
    stage = stage_of(hit("d"), hit("p1", 1_024), hit("p2"))
    before = stage.load("d")
    request = ask(tokens=LONG, max_tokens=0)
    placement = stage.placer.reserve(request)
    assert placement.prefill is not None and placement.prefill.worker.worker_id == "p1"
    again = ask(tokens=LONG, max_tokens=0, exclude_workers=frozenset({WorkerKey("m", "p1")}))
    placement.prefill_failed(again)
    assert placement.prefill is not None and placement.prefill.worker.worker_id == "p2"
    assert stage.load("p1") == (0, 0, 0) and stage.load("p2") == (LONG, 0, 1)
    assert placement.predicted_tokens == 0
    placement.prefill_failed(None)
    assert placement.prefill is None and placement.prefilled_at is None
    assert stage.load("p2") == (0, 0, 0)
    # Now the decode worker has to compute all of it.
    assert stage.load("d") == (before[0] + LONG, before[1] + LONG, before[2] + 1)
    placement.done()
    assert stage.load("d") == before


def test_the_decode_worker_computes_a_failed_prefill_when_no_other_worker_is_left() -> None:
    stage = stage_of()
    placement = stage.placer.reserve(ask(tokens=LONG))
    placement.prefill_failed(ask(tokens=LONG, exclude_workers=frozenset({WorkerKey("m", "p")})))
    assert placement.prefill is None and stage.load("p") == (0, 0, 0)


@pytest.mark.parametrize("end", ["done", "expired", "first_token"])
def test_no_end_leaves_load_at_the_prefill_worker(end: str) -> None:
    stage = stage_of()
    placement = stage.placer.reserve(ask(tokens=LONG))
    if end == "expired":
        stage.now = 10_000.0
        stage.placer.tick()
    else:
        getattr(placement, end)()
    assert stage.load("p") == (0, 0, 0)
    placement.done()
    placement.handed_over()
    placement.prefill_failed(None)
    assert stage.load("p") == (0, 0, 0)


def test_an_idle_decode_worker_does_not_void_what_is_about_to_come() -> None:
    stage = stage_of(hit("d"), hit("p"), busy=None)
    occupy(stage, "d", 4 * LONG)
    placement = stage.placer.reserve(ask(tokens=LONG, max_tokens=0))
    assert placement.prefill is not None
    # The prefill takes long, and the decode worker has become idle meanwhile.
    stage.now = IDLE_GRACE_S + 1.0
    stage.placer.take_engine_load(WorkerKey("m", "d"), EngineLoad(0, 0))
    assert stage.load("d") == (0, 0, 0)
    placement.handed_over()
    assert stage.load("d")[1:] == (LONG, 1)
    placement.done()
    assert stage.load("d") == (0, 0, 0)


def test_a_prefill_worker_alone_serves_no_request() -> None:
    for stage in (stage_of(hit("p"), busy=None), stage_of(hit("p"), hit("d", 0, "down"), busy=None)):
        with pytest.raises(NoWorker, match="p: role prefill; register a worker that decodes") as refused:
            stage.placer.reserve(ask(tokens=LONG))
        assert refused.value.status == 503
    with pytest.raises(NoWorker, match="role prefill"):
        stage_of().placer.reserve(ask(pinned="p"))


def test_a_gateway_that_has_chosen_may_count_load_at_a_prefill_worker() -> None:
    stage = stage_of()
    placement = stage.placer.reserve(ask(tokens=LONG, pinned=Pin("p", 0)), anyway=True)
    assert placement.worker.worker_id == "p" and placement.prefill is None and not decided(stage)


def test_a_rank_is_named_exactly() -> None:
    stage = Stage(hit("w", 0), hit("w", 900, rank=1))
    assert stage.placer.reserve(ask(pinned=Pin("w", 0))).worker.dp_rank == 0
    assert stage.placer.reserve(ask(pinned="w@0")).worker.dp_rank == 0
    for whichever in ("w", Pin("w")):
        assert stage.placer.choose(ask(seed=1, pinned=whichever)).hit.worker.dp_rank == 1
    with pytest.raises(UnknownWorker, match="w@2"):
        stage.placer.reserve(ask(pinned=Pin("w", 2)))
    # This worker's own name looks like the name of a rank.
    stage = Stage(hit("w", 0), hit("w@0", 0), hit("w@0", 0, rank=3))
    assert stage.placer.reserve(ask(pinned=Pin("w", 0))).worker == WorkerKey("m", "w", 0)
    assert stage.placer.reserve(ask(pinned=Pin("w@0", 3))).worker == WorkerKey("m", "w@0", 3)


def test_exactly_the_ranks_that_failed_are_left_out() -> None:
    stage = Stage(hit("w", 900), hit("w", 0, rank=1))
    assert stage.placer.choose(ask(exclude_workers=frozenset({WorkerKey("m", "w", 0)}))).hit.worker.dp_rank == 1


tokens_st = st.integers(0, 40_000)
load_st = st.tuples(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 40))
worker_st = st.tuples(st.booleans(), tokens_st, load_st)


@given(
    num_tokens=st.integers(1, 40_000),
    workers=st.lists(worker_st, min_size=1, max_size=8),
    min_tokens=st.integers(0, 10_000),
    token_cost=st.floats(0, 5),
    seed=st.integers(0, 99),
)
def test_a_prefill_worker_never_decodes_and_a_hand_over_always_pays(
    num_tokens: int, workers: list[Any], min_tokens: int, token_cost: float, seed: int
) -> None:
    table, hits, prefillers = LoadTable(), [], set()
    for number, (only_prefill, reused, (queued, decoded, requests)) in enumerate(workers):
        worker_hit = hit(f"w{number}", min(reused, num_tokens - 1))
        hits.append(worker_hit)
        if only_prefill:
            prefillers.add(worker_hit.worker)
        for n in range(requests):
            table.reserve(f"{number}-{n}", worker_hit.worker, queued // requests, decoded // requests, 0.0)
    decoders, others = split_by_role(hits, prefillers)
    if not decoders or not others:
        return
    context, rng = ChoiceContext(num_tokens, LoadModel(table, 131_072)), Random(seed)
    rules = SplitRules(min_tokens, token_cost)
    alone = choose(decoders, context, rng)
    choice, outcome = with_prefill(alone, others, context, rules, rng, arriving={})
    assert choice.hit == alone.hit and choice.hit.worker not in prefillers
    assert (choice.prefill is None) == (outcome is not PrefillOutcome.REMOTE)
    uncached = num_tokens - choice.hit.tokens
    if choice.prefill is None:
        assert choice.prefill_tokens == uncached
        return
    prefill_hit = choice.prefill.hit
    assert prefill_hit.worker in prefillers and uncached >= min_tokens
    assert choice.alone_tokens == uncached and choice.prefill_tokens == round(token_cost * uncached)
    burdens = {hit.worker: context.weights.burden(hit.worker) for hit in hits}
    assert not burdens[prefill_hit.worker].saturated
    # A prefill worker never keeps the prompt longer than the decode worker would, except for the delay that this spares
    # the requests running there.
    burden = burdens[choice.hit.worker]
    here_at_most = (1 + DISTURBED_MAX) * uncached + burden.queued_tokens + burden.decode_tokens
    assert num_tokens - prefill_hit.tokens + burdens[prefill_hit.worker].queued_tokens + HANDOVER_TOKENS < here_at_most


def test_tokens_under_way_are_not_handed_over_twice() -> None:
    worker = WorkerKey("m", "d")
    context = ChoiceContext(LONG, LoadModel(LoadTable(), 131_072))
    for number in range(16):
        context.weights.table.reserve(str(number), worker, 1_000, 1_000, 0.0)
    alone = choose([hit("d")], context, Random(0))
    choice, _ = with_prefill(alone, [hit("p")], context, RULES, Random(0), arriving={worker: LONG - 192})
    assert choice.prefill is not None and choice.prefill_tokens == round(0.2 * 192)


def test_the_question_with_hashes_alone_is_decided_alike() -> None:
    stage = stage_of()
    question = ask(tokens=LONG).question
    hashes = np.arange(1, LONG // 16 + 1, dtype=np.uint64)
    from msgspec.structs import replace

    request = replace(ask(), question=replace(question, token_ids=None, block_hashes=hashes))
    assert stage.placer.choose(request).prefill is not None
