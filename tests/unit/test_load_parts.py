# SPDX-License-Identifier: Apache-2.0
"""Parts of the load model, on a clock of the test: rates, engines' numbers, sessions, pending prefixes, the queue."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvrouter.router.base.common.errors import QueueFull
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.engines.engine_metrics import EngineLoad, engine_life, engine_ranks, parse_engine_load
from kvrouter.router.model.engines.sglang.description import SGLANG
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.prefix_tree import (
    PIECE_TOKENS,
    PrefixTree,
    PromptPrefixes,
    names_of,
    settle,
    step_of,
    tokens_at,
)
from kvrouter.router.route.load.session_affinity import SessionMemory
from kvrouter.router.route.load.wait_queue import TRIES_PER_LOOK, Waiter, WaitQueue
from kvrouter.router.route.load.worker_load import GAUGE_TTL_S, IDLE_GRACE_S, LoadModel
from kvrouter.router.route.load.worker_speed import SAMPLES_MIN, WorkerSpeed, weighted_median

A, B, C = WorkerKey("m", "a"), WorkerKey("m", "b"), WorkerKey("m", "c")


# -- rates


def test_the_prefill_rate_is_that_of_most_tokens_whatever_some_samples_say() -> None:
    rates, rng = WorkerSpeed(), random.Random(3)
    for number in range(40):
        tokens, queued = rng.randrange(600, 20_000), rng.randrange(0, 20_000)
        seconds = (tokens + queued) / 10_000 * rng.uniform(0.95, 1.05)
        # Every fifth sample is a stall, a wrong prediction or an answer that waited for something else.
        rates.first_token(tokens, 0, queued, seconds * rng.choice([0.01, 20]) if number % 5 == 0 else seconds)
    assert rates.prefill_rate == pytest.approx(10_000, rel=0.1)


def test_nothing_is_known_of_a_worker_before_some_prompts_nor_from_short_ones() -> None:
    rates = WorkerSpeed()
    for _ in range(100):
        rates.first_token(100, 0, 0, 0.5)
        rates.first_token(1_000, 0, 0, 0.0)
    assert rates.prefill_rate is None
    for _ in range(SAMPLES_MIN - 1):
        rates.first_token(1_000, 0, 0, 0.5)
    assert rates.prefill_rate is None
    rates.first_token(1_000, 0, 0, 0.5)
    assert rates.prefill_rate == 2_000


def test_a_worker_that_became_slower_is_soon_known_to_be() -> None:
    rates = WorkerSpeed()
    for speed in (10_000, 2_000):
        for _ in range(60):
            rates.first_token(5_000, 0, 0, 5_000 / speed)
    assert rates.prefill_rate == 2_000


def test_the_cost_of_loading_is_learned_once_the_prefill_rate_is_known() -> None:
    rates = WorkerSpeed()
    for _ in range(SAMPLES_MIN):
        rates.first_token(1_000, 8_000, 0, 0.1)
    assert rates.loaded_token_cost is None
    for _ in range(SAMPLES_MIN):
        rates.first_token(10_000, 0, 0, 1.0)
    for _ in range(SAMPLES_MIN):
        # The worker computes 1,000 tokens in 0.1 s, and loads 8,000 in 0.2 s, where computing them would take 0.8 s.
        rates.first_token(1_000, 8_000, 0, 0.3)
    assert rates.loaded_token_cost == pytest.approx(0.25)


def test_the_decode_rate_comes_from_answers_of_some_length() -> None:
    rates = WorkerSpeed()
    for _ in range(SAMPLES_MIN):
        rates.decoded(3, 0.001)
        rates.decoded(100, 2.0)
    assert rates.decode_rate == 50


def test_the_weighted_median_is_where_half_of_the_weight_is() -> None:
    assert weighted_median([(1, 5.0), (1, 1.0), (1, 3.0)]) == 3.0
    assert weighted_median([(10, 1.0), (1, 100.0), (1, 200.0)]) == 1.0
    assert weighted_median([(1, 7.0)]) == 7.0


# -- what engines say

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1.5e-05
"""


def test_each_rank_of_an_engine_has_its_numbers() -> None:
    assert parse_engine_load(PAGE, 0, VLLM.gauges) == EngineLoad(2, 3, 0.25)
    assert parse_engine_load(PAGE, 1, VLLM.gauges) == EngineLoad(0, 5, 1.5e-05)
    assert parse_engine_load(PAGE, 2, VLLM.gauges) is None


def test_the_ranks_of_an_engine_are_the_labels_of_its_metrics() -> None:
    page = b'vllm:num_requests_running{engine="5",model_name="m"} 3\nvllm:num_requests_running{engine="4"} 1\n'
    assert engine_ranks(page, VLLM.gauges) == (4, 5)
    assert engine_ranks(b"vllm:num_requests_running 3\n", VLLM.gauges) == ()


def test_every_engine_has_its_own_names() -> None:
    page = b"""sglang:num_running_reqs{dp_rank="0",engine_type="unified"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified"} 4.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified"} 1.0
sglang:num_queue_reqs{dp_rank="1",engine_type="unified"} 2.0
sglang:token_usage{dp_rank="1",engine_type="unified"} 0.5
sglang:startup_time_seconds{model_name="m",phase="scheduler_e2e"} 3.952485339000077
"""
    assert parse_engine_load(page, 1, SGLANG.gauges) == EngineLoad(2, 4, 0.5)
    assert engine_ranks(page, SGLANG.gauges) == (0, 1)
    assert engine_life(page, SGLANG.gauges) == 3.952485339000077
    assert parse_engine_load(page, 1, VLLM.gauges) is None and engine_life(page, VLLM.gauges) is None
    # A number that is cut in two is no number.
    assert engine_life(page[:-3], SGLANG.gauges) is None


def test_an_engine_without_core_labels_reports_its_only_core() -> None:
    page = b"vllm:num_requests_running 3\r\nvllm:num_requests_waiting 1\r\n"
    assert parse_engine_load(page, 4, VLLM.gauges) == EngineLoad(1, 3, 0.0)
    labelled_page = b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0"} 1\n'
    assert parse_engine_load(labelled_page, 4, VLLM.gauges) == EngineLoad(1, 3, 0.0)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"vllm:num_requests_running 3\n",
        b"vllm:num_requests_running nan\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running 1.2.3\nvllm:num_requests_waiting 1\n",
        b"\xff\xfe vllm:num_requests_running 3",
    ],
)
def test_a_page_without_the_numbers_gives_no_report(page: bytes) -> None:
    assert parse_engine_load(page, 0, VLLM.gauges) is None


def test_absurd_metrics_are_bounded() -> None:
    load = parse_engine_load(
        b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting 1e99\nvllm:kv_cache_usage_perc 7\n",
        0,
        VLLM.gauges,
    )
    assert load == EngineLoad(1_000_000, 1_000_000, 1.0)


def test_requests_that_bypass_the_router_count_when_seen_twice() -> None:
    weights = LoadModel(LoadTable(), 10_000)
    weights.table.reserve("mine", A, 100, 500, 0.0)
    weights.take_engine_load(A, EngineLoad(3, 2), 1.0)
    assert weights.burden(A).queued_tokens == 100
    weights.take_engine_load(A, EngineLoad(3, 2), 2.0)
    # Four of the five requests are not this router's: three wait and one runs, each like those that this router placed.
    assert weights.burden(A).queued_tokens == 100 + 3 * 1_000
    assert weights.burden(A).decode_tokens == 500 + 2_000
    assert weights.burden(A).requests == 5
    weights.take_engine_load(A, EngineLoad(0, 1), 3.0)
    assert weights.burden(A).queued_tokens == 100
    weights.take_engine_load(A, EngineLoad(3, 2), 4.0)
    assert weights.burden(A).queued_tokens == 100
    weights.take_engine_load(A, EngineLoad(3, 2), 5.0)
    assert weights.burden(A).queued_tokens == 100 + 3 * 1_000
    weights.tick([A], 5.0 + GAUGE_TTL_S + 0.1)
    assert weights.burden(A).queued_tokens == 100


def test_an_idle_engine_ends_what_was_reserved_there_a_while_ago() -> None:
    weights = LoadModel(LoadTable(), 10_000)
    weights.table.reserve("old", A, 100, 10, 0.0)
    weights.table.reserve("elsewhere", B, 100, 10, 0.0)
    weights.table.reserve("new", A, 70, 10, IDLE_GRACE_S)
    assert weights.take_engine_load(A, EngineLoad(0, 0), IDLE_GRACE_S + 1) == 1
    assert (weights.burden(A).queued_tokens, weights.burden(B).queued_tokens) == (70, 100)
    assert "old" in weights.table


def test_a_worker_is_slow_beside_the_others_of_its_model_only() -> None:
    weights, c, other = LoadModel(LoadTable(), 10_000), WorkerKey("m", "c"), WorkerKey("other", "a")
    for worker, speed in ((A, 1_000), (B, 3_000), (c, 3_100), (other, 10)):
        for _ in range(SAMPLES_MIN):
            weights.rates_of(worker).first_token(6_000, 0, 0, 6_000 / speed)
    weights.tick([A, B, c, other], 0.0)
    assert weights.slowness == {A: pytest.approx(3.0)}
    weights.tick([B], 0.0)
    assert set(weights.rates) == {B} and not weights.slowness


# -- sessions


def test_a_worker_without_a_speed_has_that_of_its_model_or_else_of_the_fleet() -> None:
    weights = LoadModel(LoadTable(), 1)
    one, two, three = (WorkerKey("m", name) for name in ("a", "b", "c"))
    other = WorkerKey("other", "a")
    assert weights.prefill_rate(one) is None
    for worker, rate in ((one, 1_000), (two, 3_000)):
        for _ in range(SAMPLES_MIN):
            weights.rates_of(worker).first_token(rate, 0, 0, 1.0)
    weights.tick([one, two, three, other], 0.0)
    assert [weights.prefill_rate(worker) for worker in (one, two, three, other)] == [1_000, 3_000, 2_000, 2_000]


def test_sessions_are_bounded_in_time_and_number() -> None:
    memory = SessionMemory(ttl_s=10.0, max_sessions=3)
    memory.record_choice("s", A, 100, 0.0)
    place = memory.find("m", "s", 9.0)
    assert place is not None and (place.worker, place.tokens) == (A, 100)
    assert memory.find("m", "s", 10.0) is None and memory.find("other", "s", 1.0) is None
    memory.record_choice("s", B, 200, 5.0)
    for number in range(2):
        memory.record_choice(f"t{number}", A, 1, 6.0)
    assert memory.find("m", "s", 7.0) == (B, 200, 15.0)
    memory.record_choice("t2", A, 1, 7.0)
    assert len(memory) == 3 and memory.find("m", "s", 7.0) is None
    memory.expire(16.5)
    assert len(memory) == 1
    memory.record_choice("x" * 10_000, A, 1, 20.0)
    assert memory.find("m", "x" * 10_000, 20.0) is None


# -- pending prefixes


def question(*pieces: int, **fields: str) -> Question:
    tokens = np.concatenate([np.full(PIECE_TOKENS, piece, np.int64) for piece in pieces] or [np.empty(0, np.int64)])
    return Question("m", len(tokens), token_ids=tokens, **fields)  # type: ignore[arg-type]


def prefixes_of(asked: Question, seed: int = 7) -> PromptPrefixes:
    return PromptPrefixes([names_of(asked, 16, seed)], step_of(asked, 16))


def pending_tokens(tree: PrefixTree, asked: Question, now: float) -> dict[WorkerKey, int]:
    prefixes = prefixes_of(asked)
    return tokens_at(tree.find(prefixes.names), prefixes.step_tokens, asked.num_tokens, now)


def test_siblings_are_credited_with_what_they_share_until_it_ends() -> None:
    tree = PrefixTree()
    first = question(1, 2, 3)
    tree.sent(prefixes_of(first), A, 0.0, 10.0)
    assert pending_tokens(tree, question(1, 2, 9, 9), 5.0) == {A: 2 * PIECE_TOKENS}
    # One token must always be computed.
    assert pending_tokens(tree, first, 5.0) == {A: 3 * PIECE_TOKENS - 1}
    assert pending_tokens(tree, question(9, 2, 3), 5.0) == {}
    assert pending_tokens(tree, first, 10.0) == {}


def test_a_salt_and_an_adapter_keep_prompts_apart() -> None:
    tree = PrefixTree()
    tree.sent(prefixes_of(question(1)), A, 0.0, 10.0)
    for changed in (question(1, cache_salt="s"), question(1, lora_name="l")):
        assert pending_tokens(tree, changed, 1.0) == {}
    # Names depend on a secret of the process.
    assert prefixes_of(question(1), 8).names != prefixes_of(question(1)).names


def test_block_hashes_are_names_already() -> None:
    hashes = np.arange(1, 65, dtype=np.uint64)
    prefixes = prefixes_of(Question("m", 1_025, block_hashes=hashes))
    assert (prefixes.names, prefixes.step_tokens) == ([8, 16, 24, 32, 40, 48, 56, 64], 128)
    tree = PrefixTree()
    tree.sent(PromptPrefixes([prefixes.names[:4]]), A, 0.0, 10.0)
    assert tokens_at(tree.find(prefixes.names), 128, 1_025, 0.0) == {A: 512}
    assert prefixes_of(Question("m", 5, block_hashes=np.empty(0, np.uint64))).names == []


def test_the_first_token_shortens_pending_credit() -> None:
    tree = PrefixTree()
    first, second = prefixes_of(question(1)), prefixes_of(question(1))
    tree.sent(first, A, 0.0, 10.0)
    tree.sent(second, B, 0.0, 10.0)
    # Another prompt splits the node in which both end.
    tree.sent(prefixes_of(question(1, 2)), C, 0.0, 1.0)
    settle(first, A, 3.0)
    settle(first, A, 8.0)
    assert pending_tokens(tree, question(1, 2), 2.0) == {A: PIECE_TOKENS, B: PIECE_TOKENS}
    assert pending_tokens(tree, question(1, 2), 4.0) == {B: PIECE_TOKENS}


def test_a_prompts_end_is_forgotten_first_and_counts_again_once_it_is_sent_again() -> None:
    tree = PrefixTree(max_names=3)
    long, other = PromptPrefixes([[1, 2, 3]]), PromptPrefixes([[1, 2, 4]])
    tree.sent(long, A, 0.0, 10.0)
    tree.sent(other, B, 0.0, 10.0)
    assert len(tree) == 3 and tokens_at(tree.find([1, 2, 3]), 10, 1_000, 0.0) == {A: 20, B: 20}
    # Its first token is no longer about the part that was forgotten.
    settle(long, A, 5.0)
    assert tokens_at(tree.find([1, 2, 3]), 10, 1_000, 6.0) == {B: 20}
    tree.sent(long, A, 6.0, 10.0)
    assert tokens_at(tree.find([1, 2, 3]), 10, 1_000, 6.0) == {A: 30, B: 20}


# -- the waiting line


def test_the_queue_is_served_in_order_and_bounded() -> None:
    line: WaitQueue[str] = WaitQueue(3)
    waiters = [Waiter("m", 10, name) for name in "abc"]
    for waiter in waiters:
        line.join(waiter, 1.0)
    with pytest.raises(QueueFull) as refused:
        line.join(Waiter("n", 10, "d"), 7.0)
    assert refused.value.retry_after_s == 7.0 and refused.value.status == 429
    assert line.waits_for("m") and not line.waits_for("n") and line.of("m") == (3, 30)
    tried: list[str] = []

    def two_at_most(name: str) -> bool:
        tried.append(name)
        return len(tried) <= 2

    assert line.serve(two_at_most) == 2 and tried == ["a", "b", "c"]
    line.leave(waiters[2])
    line.leave(waiters[2])
    assert len(line) == 0 and not line.waits_for("m")


def test_a_prompt_that_cannot_be_placed_does_not_block_others() -> None:
    line: WaitQueue[int] = WaitQueue(100)
    for number in range(50):
        line.join(Waiter("m", 1, number), 1.0)
    tried: list[int] = []

    def only_odd(number: int) -> bool:
        tried.append(number)
        return number % 2 == 1

    assert line.serve(only_odd) == TRIES_PER_LOOK - 1
    assert len(tried) == 2 * TRIES_PER_LOOK - 1
