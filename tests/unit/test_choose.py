# SPDX-License-Identifier: Apache-2.0
"""Choice of the least cost (prefill by tier, queued and decoded tokens, the session's bonus), and its reason."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvrouter.contract.choices import CostTerms
from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.key_shares import KeyShare
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.session_affinity import SessionPlace
from kvrouter.router.route.load.worker_load import PROGRESS_MAX, LoadModel
from kvrouter.router.route.load.worker_speed import SAMPLES_MIN, SLOWNESS_MAX, SLOWNESS_MIN, slowness
from kvrouter.router.route.placement import choose as choosing
from kvrouter.router.route.placement.choose import LOST_REASONS, Choice, choose
from kvrouter.router.route.placement.copies import Copies
from kvrouter.router.route.placement.cost import (
    DECODE_TOKEN_COST,
    DELAY_WEIGHT,
    JUNCTION_SHARE,
    ROOM_WEIGHT,
    SESSION_SHARE_BLIND,
    SESSION_SHARE_KNOWN,
    ChoiceContext,
    weigh,
)
from kvrouter.router.route.placement.policies import KV, OTHERS, policy

TOKENS = 200


def hit(name: str, gpu: int, cpu: int | None = None, disk: int | None = None, full: int = 0, reason: str = "") -> Hit:
    cpu = gpu if cpu is None else cpu
    return Hit(key(name), (gpu, cpu, cpu if disk is None else disk), "live", reason, full_attention=max(full, gpu))


def key(name: str) -> WorkerKey:
    return WorkerKey("m", name)


def weights(saturation: int = 10_000, **queued: int) -> LoadModel:
    model = LoadModel(LoadTable(), saturation)
    for name, tokens in queued.items():
        model.table.reserve(name, key(name), tokens, 0, 0.0)
    return model


def chosen(*hits: Hit, seed: int = 0, **context: Any) -> Choice:
    arguments = {"num_tokens": TOKENS, "weights": weights(), **context}
    return choose(hits, ChoiceContext(**arguments), Random(seed))


def name_of(choice: Choice) -> str:
    return choice.hit.worker.worker_id


def test_the_longest_reuse_wins_whatever_tier_it_comes_from() -> None:
    assert name_of(chosen(hit("a", 96), hit("b", 16, 160))) == "b"
    assert name_of(chosen(hit("a", 32), hit("b", 16, 16, 160))) == "b"


def test_loading_blocks_back_from_a_tier_costs_tokens() -> None:
    far = hit("far", 0, 0, 112)
    assert name_of(chosen(hit("near", 96), far)) == "near"
    cheap = weights()
    cheap.token_costs = (0.0, 0.0, 0.0)
    assert name_of(chosen(hit("near", 96), far, weights=cheap)) == "far"


def test_among_equal_costs_the_nearer_tier_wins() -> None:
    free = weights()
    free.token_costs = (0.0, 0.0, 0.0)
    for seed in range(20):
        assert name_of(chosen(hit("a", 16, 96), hit("b", 96), seed=seed, weights=free)) == "b"
        assert name_of(chosen(hit("a", 16, 16, 96), hit("b", 16, 96), seed=seed, weights=free)) == "b"


def test_a_longer_full_attention_hit_earns_a_bonus() -> None:
    for seed in range(20):
        assert name_of(chosen(hit("a", 16), hit("b", 16, full=64), seed=seed)) == "b"
    # Twice as many blocks of full attention alone are not worth an actual hit, and a queue outweighs them.
    assert name_of(chosen(hit("a", 96), hit("b", 0, full=192))) == "a"
    promising = chosen(hit("a", 16), hit("b", 0, full=192))
    assert name_of(promising) == "b" and promising.lost == "affinity"
    assert name_of(chosen(hit("a", 16), hit("b", 16, full=64), weights=weights(b=50))) == "a"


def test_work_that_leaves_a_checkpoint_delays_nobody_but_a_long_queue_outweighs_it() -> None:
    hits = (hit("a", 0), hit("b", 0, full=192))
    assert [name_of(chosen(*hits, weights=weights(b=queued))) for queued in (0, 100, 400)] == ["b", "b", "a"]


def test_equal_workers_are_chosen_at_random() -> None:
    wins = Counter(name_of(chosen(hit("a", 96), hit("b", 96), hit("c", 96), seed=seed)) for seed in range(600))
    assert set(wins) == {"a", "b", "c"} and min(wins.values()) > 120


def test_queued_tokens_are_weighed_against_reused_tokens() -> None:
    hits = (hit("warm", 96), hit("cold", 0))
    # The hit saves 96 tokens of computing, and also keeps later prompts back a little less.
    assert name_of(chosen(*hits, weights=weights(warm=105))) == "warm"
    choice = chosen(*hits, weights=weights(warm=120))
    assert name_of(choice) == "cold" and choice.lost == "load"
    assert choice.reason == "computes all 200 tokens; warm would reuse 96, but has 120 tokens of load"


def test_decoded_tokens_count_a_little() -> None:
    load = weights()
    load.table.reserve("r", key("a"), 0, round(40 / DECODE_TOKEN_COST), 0.0)
    assert name_of(chosen(hit("a", 96), hit("b", 80), weights=load)) == "b"
    assert name_of(chosen(hit("a", 96), hit("b", 64), weights=load)) == "a"


def test_among_equal_hits_the_least_loaded_worker_is_chosen_and_the_reason_says_so() -> None:
    choice = chosen(hit("a", 96), hit("b", 96), hit("c", 96), weights=weights(a=10, b=20))
    assert name_of(choice) == "c" and not choice.lost
    assert choice.reason == "reuses 96 of 200 tokens (96 on the GPU); the least loaded of 3 that reuse as much"


def test_a_saturated_worker_has_no_affinity_unless_all_are() -> None:
    hits = (hit("warm", 192), hit("cold", 0))
    choice = chosen(*hits, weights=weights(50, warm=60))
    assert (name_of(choice), choice.lost, choice.all_saturated) == ("cold", "load", False)
    assert "warm would reuse 192, but it is saturated" in choice.reason
    all_full = chosen(*hits, weights=weights(50, warm=60, cold=70))
    assert (
        name_of(all_full) == "warm"
        and all_full.all_saturated
        and all_full.reason.endswith("; all workers are saturated")
    )


def test_an_engine_with_nothing_waiting_is_not_saturated_by_what_is_reserved() -> None:
    load = weights(50, warm=60)
    load.take_engine_load(key("warm"), EngineLoad(0, 1), 0.0)
    assert not chosen(hit("warm", 192), weights=load).all_saturated
    load.take_engine_load(key("warm"), EngineLoad(1, 1), 0.0)
    assert chosen(hit("warm", 192), weights=load).all_saturated


def test_an_engine_whose_cache_is_full_and_where_prompts_wait_is_saturated() -> None:
    load = weights()
    load.take_engine_load(key("a"), EngineLoad(1, 5, 0.99), 0.0)
    assert name_of(chosen(hit("a", 192), hit("b", 0), weights=load)) == "b"


def test_a_saturated_worker_is_not_skipped_for_one_with_a_longer_queue() -> None:
    """Prefer the saturated worker with the shorter queue.

    An engine that has just restarted has an empty cache, so it is never full. Without this rule it got every prompt,
    behind a queue that was twelve times as long as the other engines' queues.
    """
    load = weights(full=500, restarted=6_000)
    load.take_engine_load(key("full"), EngineLoad(1, 5, 0.99), 0.0)
    assert load.burden(key("full")).saturated and not load.burden(key("restarted")).saturated
    choice = chosen(hit("full", 0), hit("restarted", 0), weights=load)
    assert (name_of(choice), choice.all_saturated) == ("full", False) and "saturated" not in choice.reason
    chosen_empty = chosen(hit("full", 192), hit("restarted", 0), hit("empty", 0), weights=load)
    assert (name_of(chosen_empty), chosen_empty.lost) == ("empty", "load") and "it is saturated" in chosen_empty.reason


def test_a_prompt_under_way_counts_as_the_hit_that_it_will_become() -> None:
    choice = chosen(hit("a", 0), hit("b", 64), pending={key("a"): 128}, weights=weights(a=10))
    assert name_of(choice) == "a" and choice.hit.tokens == 0 and choice.lost == "affinity"
    assert choice.prefill_tokens == TOKENS - 128
    assert "128 tokens of it are being computed there" in choice.reason


def test_a_session_lowers_the_cost_of_its_worker_and_decides_nothing_alone() -> None:
    session = SessionPlace(key("a"), 10_000, 1e9)
    for seed in range(10):
        assert name_of(chosen(hit("a", 96), hit("b", 96), session=session, seed=seed)) == "a"
    assert name_of(chosen(hit("a", 0), hit("b", 96), session=session)) == "b"
    # If the tokens are not known, hits say nothing, so the session is the best guess. A queue still outweighs it.
    assert name_of(chosen(hit("a", 0), hit("b", 0), session=session, blind=True, weights=weights(a=30))) == "a"
    limit = int(TOKENS * SESSION_SHARE_BLIND)
    assert name_of(chosen(hit("a", 0), hit("b", 0), session=session, blind=True, weights=weights(a=2 * limit))) == "b"


def test_a_slow_worker_costs_more_for_the_same_tokens() -> None:
    assert slowness(100.0, 110.0) == 1.0 and slowness(None, 5.0) == 1.0
    assert slowness(100.0, 300.0) == 3.0 and slowness(1.0, 1e9) == 4.0 and slowness(1e9, 1.0) == 0.25
    load = weights()
    load.slowness = {key("slow"): 3.0}
    assert name_of(chosen(hit("slow", 80), hit("b", 0), weights=load)) == "b"


def test_a_higher_temperature_samples_more_widely() -> None:
    def share(temperature: float) -> float:
        picked = policy("kv", temperature)
        wins = [name_of(chosen(hit("a", 100), hit("b", 0), policy=picked, seed=seed)) for seed in range(400)]
        return wins.count("b") / len(wins)

    assert share(0.0) == 0.0
    assert 0.02 < share(0.4) < 0.15 and 0.2 < share(1.0) < 0.35


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kv", "c"),
        ("least_load", "d"),
        ("prefix_only", "a"),
        ("full_attention_only", "b"),
    ],
)
def test_each_policy_looks_at_what_it_is_named_for(name: str, expected: str) -> None:
    hits = (hit("a", 112), hit("b", 0, full=192), hit("c", 96), hit("d", 0))
    choice = chosen(*hits, policy=policy(name), weights=weights(a=50, b=20, c=1))
    assert name_of(choice) == expected
    assert choice.lost == ("" if name == "prefix_only" else "load" if name == "kv" else "policy")


def test_round_robin_takes_turns_and_random_takes_all() -> None:
    hits = [hit(name, 0) for name in "cab"]
    turns = [name_of(chosen(*hits, policy=policy("round_robin"), turn=turn)) for turn in range(6)]
    assert turns == ["a", "b", "c"] * 2
    assert {name_of(chosen(*hits, policy=policy("random"), seed=seed)) for seed in range(50)} == {"a", "b", "c"}


def test_every_worker_is_explained_with_the_parts_of_its_cost() -> None:
    load = weights(a=50)
    choice = chosen(hit("a", 64, 128, 160), hit("b", 0), weights=load)
    first, second = choice.candidates
    # The worker computes 40 tokens, and loads 64 and 32 back at the cost of 13 and 22; the usual prompt has 1,000.
    delay = DELAY_WEIGHT * 75.2 * (2 * 50 + 75.2) / 2_000
    assert (first.hit.worker.worker_id, first.cost, first.load) == ("a", round(75.2 + 50 + delay), 50)
    assert first.parts == CostTerms(
        prefill=75, queued=50, decode=0, delay=round(delay), room=0, copy=0, junction=0, session=0
    )
    assert (second.cost, second.load) == (200 + 20 * DELAY_WEIGHT, 0)
    assert choice.reason == "reuses 160 of 200 tokens (64 on the GPU, 64 more from the CPU tier, 32 more from storage)"


def test_the_computed_part_of_a_running_prompt_is_not_queued() -> None:
    load = weights(warm=100)
    hits = (hit("warm", 80), hit("cold", 0))
    # The worker's speed is not known yet.
    assert name_of(chosen(*hits, weights=load, now=9.0)) == "cold"
    for _ in range(SAMPLES_MIN):
        load.rates_of(key("warm")).first_token(1_000, 0, 0, 10.0)
    assert name_of(chosen(*hits, weights=load, now=0.0)) == "cold"
    choice = chosen(*hits, weights=load, now=0.5)
    assert name_of(choice) == "warm" and choice.queued_tokens == 50
    # A prompt that is late is not done, and the prompts behind it have not begun.
    load.table.reserve("second", key("warm"), 60, 0, 0.5)
    assert chosen(hits[0], weights=load, now=60.0).queued_tokens == 100 - round(100 * PROGRESS_MAX) + 60
    load.table.prefill_done("warm", 60.0)
    assert chosen(hits[0], weights=load, now=60.0).queued_tokens == 60


def test_a_long_computation_behind_a_queue_costs_a_delay() -> None:
    # By tokens alone, both workers are equal: 100 to compute behind 100, or 200 behind none.
    choice = chosen(hit("a", 100), hit("b", 0), weights=weights(a=100))
    assert [candidate.parts.delay for candidate in choice.candidates] == [15 * DELAY_WEIGHT, 20 * DELAY_WEIGHT]
    assert name_of(choice) == "a"


@given(st.data())
def test_a_worker_that_is_no_worse_in_any_respect_costs_no_more(data: st.DataObject) -> None:
    tokens, usual = data.draw(st.integers(1, 100_000)), data.draw(st.integers(1, 50_000))

    def pair(most: int) -> list[int]:
        return sorted(data.draw(st.tuples(st.integers(0, most), st.integers(0, most))))

    (far, near), (low, high), (few, many) = pair(tokens - 1), pair(300_000), pair(10_000_000)
    load = LoadModel(LoadTable(), 10**9)
    for _ in range(3_000):
        load.typical(usual, usual)
    load.table.reserve("better", key("better"), low, few, 0.0)
    load.table.reserve("worse", key("worse"), high, many, 0.0)
    slow = sorted(data.draw(st.tuples(*[st.floats(SLOWNESS_MIN, SLOWNESS_MAX)] * 2)))
    load.slowness = {key("better"): slow[0], key("worse"): slow[1]}
    runs = pair(tokens - 1)
    better, worse = hit("better", near, full=max(near, runs[1])), hit("worse", far, full=max(far, runs[0]))
    session = SessionPlace(key("better"), data.draw(st.integers(0, tokens)), 1e9) if data.draw(st.booleans()) else None
    saved = st.lists(st.floats(0, 255.9), max_size=50)
    copies = Copies([0.0, *itertools.accumulate(data.draw(saved))], 256)
    writes = ModelWrites()
    for name, stored in zip(("better", "worse"), pair(5_000), strict=True):
        writes.state(key(name), 1_000)
        writes.stored(key(name), stored)
    busy = data.draw(st.floats(0, 0.9))
    context = ChoiceContext(
        tokens, load, session=session, blind=data.draw(st.booleans()), writes=writes, copies=copies, busy=busy
    )
    less, more = weigh((better, worse), context, near).totals
    assert less <= more


def some_writes(rng: Random) -> ModelWrites:
    """Return the caches of four workers, written at random; one worker states no size and never evicts."""
    writes = ModelWrites()
    for name in "abc":
        writes.state(key(name), rng.randint(100, 1_000))
    for _ in range(rng.randrange(200)):
        worker = key(rng.choice("abcd"))
        writes.stored(worker, rng.randint(1, 50))
        if worker != key("d"):
            writes.removed(worker, rng.randint(1, 50))
    return writes


def waiting(worker: WorkerKey, context: ChoiceContext) -> float:
    """Return the tokens queued at a worker, less the tokens already computed of the current prompt."""
    model, load = context.weights, context.weights.table.loads.get(worker)
    computed = model.progress_tokens(worker, load, context.now) if load is not None and load.prefill_tokens else 0.0
    return model.burden(worker).queued_tokens - computed


def written_out(one: Hit, hits: Sequence[Hit], context: ChoiceContext, longest: int) -> dict[str, float]:
    """Return the terms of a cost, computed as the docs describe them."""
    model, worker = context.weights, one.worker
    backlog, factor = model.burden(worker), model.slowness.get(worker, 1.0)
    gpu, cpu, disk = one.by_tier
    prefill = context.num_tokens - disk + (cpu - gpu) * model.token_costs[1] + (disk - cpu) * model.token_costs[2]
    prefill = min(prefill, context.num_tokens - context.pending.get(worker, 0))
    work, queued = factor * prefill, factor * waiting(worker, context)
    reached = {hit.worker: max(hit.tokens, context.pending.get(hit.worker, 0)) for hit in hits}
    steps, piece_tokens = context.copies.saved_tokens, context.copies.piece_tokens
    shared = min(max(longest, *reached.values()), (len(steps) - 1) * piece_tokens)
    saved = factor * sum(
        (steps[token // piece_tokens + 1] - steps[token // piece_tokens]) / piece_tokens
        for token in range(reached[worker], shared)
    )
    relieved = min(
        (
            model.slowness.get(holder, 1.0)
            * (waiting(holder, context) + model.burden(holder).decode_tokens * DECODE_TOKEN_COST)
            for holder in reached
            if reached[holder] > shared - piece_tokens
        ),
        default=0.0,
    )
    junction = max(0, one.full_attention - longest) * JUNCTION_SHARE
    lasting, odds = max(0.0, work - saved - junction), context.busy / (1 - context.busy)
    new = context.num_tokens - max(one.on_gpu, context.pending.get(worker, 0))
    room = ROOM_WEIGHT * new * context.writes.pressures()[0].get(worker, 0.0)
    room *= 1.0 if context.key_share is None else context.key_share.price(worker)
    share = SESSION_SHARE_BLIND if context.blind or one.reason or one.approximate else SESSION_SHARE_KNOWN
    session = context.session
    return {
        "prefill": work,
        "queued": queued,
        "decode": backlog.decode_tokens * DECODE_TOKEN_COST,
        "delay": DELAY_WEIGHT * odds * lasting * (2 * queued + lasting) / (2 * model.usual_prefill_tokens),
        "room": room,
        "copy": saved * relieved / (relieved + work),
        "junction": junction,
        "session": min(session.tokens, prefill) * share if session is not None and session.worker == worker else 0.0,
    }


@given(st.randoms(use_true_random=False))
def test_a_cost_is_the_sum_of_the_terms_that_explain_it(rng: Random) -> None:
    load = weights(500, **{name: rng.randrange(600) for name in "abcd"})
    load.token_costs = (0.0, rng.random(), rng.random())
    for name in "ab":
        for _ in range(SAMPLES_MIN):
            load.rates_of(key(name)).first_token(1_000, 0, 0, rng.uniform(5.0, 20.0))
        load.table.reserve(f"decoding at {name}", key(name), 0, rng.randrange(1_000_000), 0.0)
    load.slowness = {key("a"): rng.choice([2.0, 0.5])}
    for _ in range(2):
        load.take_engine_load(key("b"), EngineLoad(rng.randrange(3), rng.randrange(3), rng.random()), 0.0)
    gpu, cpu, disk = sorted(rng.randrange(TOKENS) for _ in range(3))
    hits = []
    for name in "abcd":
        deeper: dict[str, Any] = {"cpu": cpu, "disk": disk} if rng.random() < 0.5 else {}
        hits.append(hit(name, gpu, **deeper, full=rng.randrange(TOKENS), reason=rng.choice(["", "no"])))
    context = ChoiceContext(
        TOKENS,
        load,
        {key(name): rng.randrange(TOKENS) for name in rng.sample("cde", 2)},
        SessionPlace(key(rng.choice("abcd")), rng.randrange(400), 1.0),
        blind=rng.random() < 0.5,
        now=rng.uniform(0, 5),
        writes=some_writes(rng),
        copies=Copies([0.0, *itertools.accumulate(rng.uniform(1, 16) for _ in range(rng.randrange(8)))], 16),
        busy=rng.uniform(0.0, 0.9),
        key_share=rng.choice([None, KeyShare(rng.uniform(1, 4), {key("a"): 1.0}, {key("a"): 2.0, key("b"): 1.0})]),
    )
    longest = max(worker_hit.tokens for worker_hit in hits)
    weighed = weigh(hits, context, longest)
    explained = [weighed.candidate(i, worker_hit, 0) for i, worker_hit in enumerate(hits)]
    for worker_hit, cost, candidate in zip(hits, weighed.totals, explained, strict=True):
        terms = written_out(worker_hit, hits, context, longest)
        total = sum(-value if name in ("copy", "junction", "session") else value for name, value in terms.items())
        assert cost == candidate.cost == pytest.approx(total, abs=0.51)
        for name, value in terms.items():
            assert getattr(candidate.parts, name) == pytest.approx(value, abs=0.51), name
        assert candidate.saturated == load.burden(worker_hit.worker).saturated
    assert weigh(hits, context, longest) == weighed
    loaded = list(zip(explained, weighed.loads, strict=True))
    least = min((load for candidate, load in loaded if not candidate.saturated), default=0)
    free = [candidate for candidate, load in loaded if not candidate.saturated or load < least] or explained
    assert min(candidate.cost for candidate in free) == weighed.totals[hits.index(choose(hits, context, rng).hit)]


def full_caches(**written: int) -> ModelWrites:
    """Return pools of 1,000 blocks, all in use, into which the given numbers of blocks were written lately."""
    writes = ModelWrites()
    for name in written:
        writes.state(key(name), 1_000)
    for _ in range(max(written.values())):
        for name, blocks in written.items():
            writes.stored(key(name), blocks)
            if writes.workers[key(name)].held_blocks > 1_000:
                writes.removed(key(name), writes.workers[key(name)].held_blocks - 1_000)
    return writes


def test_a_short_hit_is_given_up_where_the_prompt_would_push_out_more() -> None:
    hits = (hit("a", 16), hit("b", 0))
    assert name_of(chosen(*hits, busy=0.0)) == "a"
    choice = chosen(*hits, busy=0.0, writes=full_caches(a=100, b=20))
    assert name_of(choice) == "b" and choice.lost == "memory"
    assert "a would reuse 16, but what the prompt pushes out of its cache is worth more" in choice.reason
    # A hit on the prompt's own history is worth more than the memory that its other tokens take.
    assert name_of(chosen(hit("a", 150), hit("b", 0), busy=0.0, writes=full_caches(a=100, b=20))) == "a"


def test_a_pool_of_unknown_size_counts_as_full_at_what_the_fullest_one_holds() -> None:
    writes = ModelWrites()
    writes.stored(key("a"), 200)
    writes.stored(key("b"), 20)
    choice = chosen(hit("a", 16), hit("b", 0), busy=0.0, writes=writes)
    assert name_of(choice) == "b" and choice.lost == "memory"


def test_a_cache_with_room_to_spare_costs_nothing() -> None:
    writes = ModelWrites()
    for name in "ab":
        writes.state(key(name), 1_000)
    writes.stored(key("a"), 200)
    choice = chosen(hit("a", 16), hit("b", 0), busy=0.0, writes=writes)
    assert name_of(choice) == "a" and choice.candidates[0].parts.room == 0


def test_a_worker_without_events_counts_as_full_as_the_others() -> None:
    silent = Hit(key("c"), all_on_gpu(0), "connecting", approximate=True)
    choice = chosen(hit("a", 0), hit("b", 0), silent, busy=0.0, writes=full_caches(a=60, b=30))
    rooms = {candidate.hit.worker.worker_id: candidate.parts.room for candidate in choice.candidates}
    assert rooms["b"] < rooms["c"] < rooms["a"]
    assert rooms["c"] == pytest.approx((rooms["a"] + rooms["b"]) / 2, abs=1)
    assert name_of(choice) == "b"


def test_an_idle_fleet_pays_for_no_queue_and_a_busy_one_for_more() -> None:
    hits = (hit("a", 100), hit("b", 0))
    delays = [chosen(*hits, busy=busy).candidates[0].parts.delay for busy in (0.0, 0.5, 0.9)]
    assert delays == [0, 5 * DELAY_WEIGHT, 9 * 5 * DELAY_WEIGHT]


POPULAR = Copies([15.0 * piece for piece in range(13)], 16)


def test_a_copy_of_a_beginning_that_many_share_is_made_where_there_is_no_queue() -> None:
    hits, queue = (hit("a", 192), hit("b", 0)), weights(a=150)
    assert name_of(chosen(*hits, weights=queue)) == "a"
    choice = chosen(*hits, weights=queue, copies=POPULAR)
    assert name_of(choice) == "b" and choice.candidates[0].parts.copy == round(180 * 150 / (150 + 200))


def test_a_copy_saves_nothing_where_a_worker_that_has_it_is_idle() -> None:
    choice = chosen(hit("a", 192), hit("b", 192), hit("c", 0), weights=weights(a=150), copies=POPULAR)
    copies = {candidate.hit.worker.worker_id: candidate.parts.copy for candidate in choice.candidates}
    assert name_of(choice) == "b" and copies == {"a": 0, "b": 0, "c": 0}


def test_a_beginning_that_is_just_computed_is_copied_too() -> None:
    hits, pending = (hit("a", 0), hit("b", 0)), {key("a"): 192}
    assert name_of(chosen(*hits, weights=weights(a=150), pending=pending)) == "a"
    choice = chosen(*hits, weights=weights(a=150), pending=pending, copies=POPULAR)
    assert name_of(choice) == "b" and choice.candidates[0].parts.copy == round(180 * 150 / (150 + 200))


def test_the_reason_without_any_hit_and_for_a_guess() -> None:
    assert chosen(hit("a", 0)).reason == "no worker holds a reusable prefix of the 200 tokens"
    assert "chosen at random among 2 equals" in chosen(hit("a", 96), hit("b", 96)).reason
    assert "tokens are not known" in chosen(hit("a", 0), blind=True).reason


def test_every_reason_of_a_loss_has_its_series() -> None:
    named = {value for name, value in vars(choosing).items() if name.isupper() and isinstance(value, str)}
    assert named - {KV, *OTHERS} == set(LOST_REASONS)
