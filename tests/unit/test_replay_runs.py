# SPDX-License-Identifier: Apache-2.0
"""A trace through a virtual fleet: unchanged figures, refused traces, and the results of an interrupted run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet_trace import Setting, endless, simulated
from kvrouter.replay.fleet.fleet_shape import (
    CACHE_TOKENS,
    REPLICAS,
    FleetShape,
    PeerSpeed,
    ReplicaShape,
    Restart,
    blocks_of,
    geometry_of,
)
from kvrouter.replay.fleet.virtual_fleet import MODEL, VirtualFleet
from kvrouter.replay.policies.names import NAMES
from kvrouter.replay.runs.policy_run import LoadProfile, PolicyRun
from kvrouter.replay.runs.pooled import endless_reuse, pooled_reuse
from kvrouter.replay.runs.simulate import simulate, text_of
from kvrouter.replay.traces.formats import read_trace
from kvrouter.replay.traces.request import Trace
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.index.matching.question import Question
from kvrouter.simulator.cache.pool import Stored
from kvrouter.simulator.engine.timing import Timing
from tests.support.replay_traces import PIECE_TOKENS, conversation_rows, small_trace, write_rows

# For 150 requests: reused, achievable and predicted tokens and the sum of times to first tokens in ms, as the fleet
# benchmark measured them when it had this machinery itself. The figures of kv and full_attention_only date from the
# change that gave the cost the terms room and copy, and a copy credit for relieving its holders.
BEFORE = {
    ("gemma3", "endless"): (2039808, 2039808, 2039808, 0),
    ("gemma3", "kv"): (2030080, 1855488, 1846272, 105034),
    ("gemma3", "full_attention_only"): (1895424, 1846784, 1826816, 106387),
    ("gemma3", "random"): (826880, 1692160, 587264, 314713),
    ("qwen3-next", "endless"): (2039808, 2039808, 2039808, 0),
    ("qwen3-next", "kv"): (2031104, 1880576, 1872384, 99950),
    ("qwen3-next", "random"): (826368, 1695744, 587264, 334007),
    ("deepseek-v4", "kv"): (2033664, 1855488, 1849856, 103436),
}


def conversations(tmp_path: Path, requests: int = 150) -> Trace:
    return read_trace(write_rows(tmp_path / "trace", conversation_rows(requests)), "mooncake")


def shape(name: str = "gemma3", *, cache_tokens: int = 60_000, cpu_tokens: int = 0, workers: int = 2) -> FleetShape:
    geometry = geometry_of(name, PIECE_TOKENS)
    return FleetShape(
        geometry, (ReplicaShape(blocks_of(geometry, cache_tokens), blocks_of(geometry, cpu_tokens)),) * workers
    )


def restarted(fleet: FleetShape, *restarts: tuple[float, int]) -> FleetShape:
    return dataclasses.replace(fleet, restarts=tuple(Restart(*restart) for restart in restarts))


@pytest.mark.parametrize(("name", "policy"), BEFORE)
def test_the_fleet_benchmark_finds_what_it_found_before(name: str, policy: str, tmp_path: Path) -> None:
    trace = conversations(tmp_path)
    setting = Setting("x", name, policy, 1, cache_tokens=CACHE_TOKENS if name == "deepseek-v4" else 60_000)
    run = (endless if policy == "endless" else simulated)(setting, trace)
    assert (sum(run.reused), sum(run.achievable), sum(run.predicted), sum(run.ttft_ms)) == BEFORE[name, policy]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    trace = conversations(tmp_path, 60)
    runs = [simulate(trace, shape(), "random", seed) for seed in (1, 1, 2)]
    assert runs[0].ttft_s == runs[1].ttft_s != runs[2].ttft_s


@pytest.mark.parametrize("policy", NAMES)
def test_under_every_policy_a_lone_conversation_reuses_what_the_index_predicts(policy: str) -> None:
    turns = [(20.0 * turn, list(range(1, 4 + turn))) for turn in range(8)]
    run = simulate(small_trace(*turns), shape(workers=1), policy, 1)
    assert run.reused == run.predicted == run.achievable
    assert run.summary().reused_share > 0.6


def test_a_request_that_fits_no_replica_is_counted_and_the_others_continue() -> None:
    trace = small_trace((0.0, [1]), (1.0, list(range(1, 900))), (2.0, [1, 2]))
    for policy in NAMES:
        run = simulate(trace, shape(), policy, 1)
        assert (run.refused, [math.isnan(ttft_s) for ttft_s in run.ttft_s]) == (1, [False, True, False])
        assert "blocks" in run.refusal
        assert run.summary().requests == 2


def test_a_cpu_tier_gives_back_what_the_gpu_evicts() -> None:
    other_prompts = [(20.0 * n, [1000 * n + i for i in range(50)]) for n in range(1, 12)]
    trace = small_trace((0.0, list(range(1, 40))), *other_prompts, (900.0, list(range(1, 45))))
    without = simulate(trace, shape(workers=1, cache_tokens=30_000), "kv", 1)
    with_tier = simulate(trace, shape(workers=1, cache_tokens=30_000, cpu_tokens=2_000_000), "kv", 1)
    assert without.reused[-1] == without.predicted[-1] == 0
    assert with_tier.reused[-1] == with_tier.predicted[-1] >= 38 * PIECE_TOKENS


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "kv"])
@pytest.mark.parametrize("gap_s", [20.0, 0.5])
def test_an_idle_replica_may_publish_as_a_request_begins(policy: str, gap_s: float) -> None:
    """Let a load begin: the stores of the prompt before end with its first step, which has no tokens."""
    trace = small_trace(*[(gap_s * n, [100 * (n % 6) + i for i in range(1, 15)]) for n in range(24)])
    run = simulate(trace, shape(workers=1, cache_tokens=12_000, cpu_tokens=400_000), policy, 1)
    assert run.reused == run.predicted
    assert all(run.reused[6:])


def test_events_are_published_at_the_time_of_the_step_that_ends_not_of_the_next_one() -> None:
    """Let the second load begin, and evict, while the first one is awaited."""
    published_s: list[float] = []
    fleet = shape("llama", cache_tokens=16_000, cpu_tokens=400_000)
    replica = fleet.replica(0, lambda now_s, events: published_s.append(now_s))
    trace = small_trace(*[(0.0, [100 * n + i for i in range(1, 15)]) for n in range(6)])

    def submit(number: int, now_s: float) -> None:
        replica.submit(text_of(trace.requests[number], fleet.geometry, number, PIECE_TOKENS), 1, now_s)

    for number in range(6):
        submit(number, 100.0 * number)
        while replica.next_s is not None:
            replica.advance()
    published_s.clear()
    submit(0, 1000.0)
    load_ends_s = replica.next_s
    submit(1, 1000.001)
    assert replica.next_s == load_ends_s and load_ends_s is not None and load_ends_s > 1000.001
    assert published_s == [1000.0, 1000.001]


def test_the_sessions_of_a_trace_reach_the_policy() -> None:
    trace = small_trace(*[(20.0 * n, [1, n + 2]) for n in range(24)])
    for number, request in enumerate(trace.requests):
        request.session = number % 6
    run = simulate(trace, shape(workers=4), "session_hash", 1)
    assert [len(set(run.worker[n::6])) for n in range(6)] == [1] * 6
    assert len(set(run.worker)) > 1


def test_a_pooled_cache_has_the_blocks_and_the_tiers_of_all(tmp_path: Path) -> None:
    """The pooled cache reuses more than either replica's, and the same whichever replica has the blocks."""
    chats = small_trace(*[(20.0 * n, [100 * (n % 6) + i for i in range(1, 15)]) for n in range(24)])
    geometry = geometry_of("llama", PIECE_TOKENS)
    # Six chats have 14 blocks each, and these pools hold one chat, two chats, and all of them.
    for_one, for_two, for_six = ReplicaShape(20), ReplicaShape(40), ReplicaShape(20, 6 * 14)
    reused = {
        name: [n for n, tokens in enumerate(pooled_reuse(chats, FleetShape(geometry, replicas))) if tokens]
        for name, replicas in {
            "few": (for_one, for_two),
            "many": (for_two, for_two, for_one),
            "tier": (for_one, for_six),
        }.items()
    }
    assert reused == {"few": [], "many": list(range(6, 24)), "tier": list(range(6, 24))}
    trace = conversations(tmp_path)
    endless = endless_reuse(trace, geometry_of("gemma3", PIECE_TOKENS))
    pooled = pooled_reuse(trace, restarted(shape(cache_tokens=400_000), (10.0, 0)))
    assert sum(pooled) <= sum(endless) and pooled_reuse(trace, shape(cache_tokens=4_000_000)) == endless


def test_a_prompt_that_does_not_fit_a_pooled_cache_reuses_nothing() -> None:
    chats = small_trace((0.0, [1, 2, 3]), (1.0, list(range(1, 900))), (2.0, [1, 2, 3]))
    finished: list[int] = []
    reused = pooled_reuse(chats, shape(workers=1), on_request=finished.append)
    assert reused[:2] == [0, 0] and reused[2] > 0
    assert finished == [1, 2, 3]


def test_requests_that_come_sooner_wait_longer(tmp_path: Path) -> None:
    trace = conversations(tmp_path, 100)
    slow, fast = (simulate(trace, shape(), "kv", 1, speedup=speedup).summary() for speedup in (1.0, 20.0))
    assert fast.ttft_mean_s > slow.ttft_mean_s
    assert fast.span_s < slow.span_s


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    trace = conversations(tmp_path)

    def interrupt(done: int) -> None:
        if done == 50:
            raise KeyboardInterrupt

    run = simulate(trace, shape(), "kv", 1, on_request=interrupt)
    complete = simulate(trace, shape(), "kv", 1)
    row = run.summary()
    assert run.partial and row.partial and not complete.partial
    assert 30 <= row.requests <= 50
    answered = [n for n, ttft_s in enumerate(run.ttft_s) if not math.isnan(ttft_s)]
    assert [run.ttft_s[n] for n in answered] == [complete.ttft_s[n] for n in answered]


def test_an_impossible_fleet_is_refused_with_what_to_do() -> None:
    trace = small_trace((0.0, [1]))
    with pytest.raises(SettingError, match="--block-tokens"):
        simulate(trace, dataclasses.replace(shape(), geometry=geometry_of("llama", 48)), "kv", 1)
    with pytest.raises(SettingError, match="a replica of this size cannot run"):
        simulate(trace, dataclasses.replace(shape(), replicas=(ReplicaShape(0),)), "kv", 1)


@pytest.mark.parametrize(
    ("restart", "problem"),
    [((1.0, 2), "no worker 2"), ((1.0, -1), "no worker -1"), ((-1.0, 0), "-1 s"), ((math.nan, 0), "nan s")],
)
def test_a_restart_names_a_replica_and_a_time(restart: tuple[float, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        restarted(shape(), restart)


@pytest.mark.parametrize("policy", NAMES)
def test_a_restarted_replica_has_lost_its_caches_and_the_index_shows_it(policy: str) -> None:
    """A restart loses the tier, too."""
    turns = [(20.0 * turn, list(range(1, 4 + turn))) for turn in range(8)]
    fleet = restarted(shape(workers=1, cpu_tokens=60_000), (70.0, 0), (130.0, 0))
    run = simulate(small_trace(*turns), fleet, policy, 1)
    assert run.reused == run.predicted == run.achievable
    assert [reused > 0 for reused in run.reused] == [False, True, True, True, False, True, True, False]


def test_events_of_an_ended_process_are_not_shown() -> None:
    """Lose the events that were under way when the process ended; credit begins with the new process's first events."""
    fleet = VirtualFleet(geometry_of("llama", PIECE_TOKENS), 1)
    names = [int(name).to_bytes(8, "big") for name in range(1, 5)]
    question = Question(MODEL, 3 * PIECE_TOKENS, block_hashes=np.arange(1, 4, dtype=np.uint64))

    def publish(*blocks: bytes) -> None:
        fleet.published(0, [Stored(0, blocks, None, (), PIECE_TOKENS, ())], fleet.now_s)

    publish(*names[:3])
    fleet.restarted(0)
    publish(names[3])
    for shown_tokens in (0, PIECE_TOKENS):
        fleet.now_s += 1.0
        fleet.catch_up()
        assert [hit.tokens for hit in fleet.hits(question)] == [shown_tokens]
        publish(names[0])


@pytest.mark.parametrize("policy", ["kv", "dynamo"])
def test_a_restart_leaves_the_other_replicas_what_they_hold(policy: str) -> None:
    turns = [(20.0 * turn, list(range(1, 4 + turn))) for turn in range(10)]
    run = simulate(small_trace(*turns), restarted(shape(workers=2), (90.0, 0), (130.0, 1)), policy, 1)
    assert run.reused == run.predicted


@pytest.mark.parametrize("policy", ["kv", "dynamo"])
def test_requests_at_a_replica_that_restarts_begin_again_in_their_order(policy: str) -> None:
    """The first request decodes, the second computes its prompt, the third waits; each keeps its arrival."""
    prompts = [(0.0, list(range(1, 11))), (1.0, list(range(100, 200))), (1.1, list(range(300, 340)))]
    trace = small_trace(*prompts, output_tokens=400)
    undisturbed, interrupted = (
        simulate(trace, fleet, policy, 1) for fleet in (shape(workers=1), restarted(shape(workers=1), (2.0, 0)))
    )
    # All three prompts are computed again: the first one's own blocks are gone, and no request is forgotten.
    assert list(interrupted.reused) == [0, 0, 0]
    first_s = [time_s + ttft_s for (time_s, _), ttft_s in zip(prompts, interrupted.ttft_s, strict=True)]
    assert 2.0 < first_s[0] <= first_s[1] <= first_s[2]
    assert undisturbed.ttft_s[0] < 1.0 and interrupted.span_s > undisturbed.span_s
    assert interrupted.ttft_s[2] > undisturbed.ttft_s[2]


def test_each_replica_computes_at_its_own_speed() -> None:
    geometry = geometry_of("gemma3", PIECE_TOKENS)
    blocks = blocks_of(geometry, 60_000)
    fast, slow = (ReplicaShape(blocks, timing=Timing(rate, 0.0, 0.0)) for rate in (10_000.0, 1_000.0))
    trace = small_trace((0.0, list(range(1, 11))), (0.001, list(range(100, 110))))
    run = simulate(trace, FleetShape(geometry, (fast, slow)), "round_robin", 1)
    tokens = 10 * PIECE_TOKENS
    assert sorted(run.worker) == [0, 1]
    assert sorted(run.ttft_s) == pytest.approx([tokens / 10_000, tokens / 1_000], rel=0.01)
    assert run.summary().computed_gpu_s == pytest.approx(tokens / 10_000 + tokens / 1_000)
    assert run.summary().prefill_share == pytest.approx((tokens / 10_000 + tokens / 1_000) / (2 * run.span_s))


def test_a_replica_with_a_smaller_pool_reuses_less() -> None:
    """Its tier, which the other replica does not have, makes up for the smaller pool."""
    geometry = geometry_of("gemma3", PIECE_TOKENS)
    small, large = (blocks_of(geometry, tokens) for tokens in (8_000, 400_000))
    chats = [(20.0 * n, [100 * (n % 6) + i for i in range(1, 15)]) for n in range(24)]
    reused = {}
    for name, first in (("small", ReplicaShape(small)), ("tier", ReplicaShape(small, large))):
        run = simulate(small_trace(*chats), FleetShape(geometry, (first, ReplicaShape(large))), "round_robin", 1)
        assert run.reused == run.predicted
        reused[name] = [sum(run.reused[n] for n in range(24) if run.worker[n] == worker) for worker in (0, 1)]
    assert reused["small"][0] == 0 < reused["small"][1]
    assert reused["tier"][0] == reused["tier"][1] == reused["small"][1]


def test_workers_fetch_what_others_hold_and_reuse_what_is_promised(tmp_path: Path) -> None:
    trace = conversations(tmp_path)
    fleet = shape(cache_tokens=100_000, cpu_tokens=200_000, workers=4)
    lending = dataclasses.replace(fleet, peer=PeerSpeed(13e9, 0.001))
    alone, fetching = simulate(trace, fleet, "kv", 1, speedup=4.0), simulate(trace, lending, "kv+pull", 1, speedup=4.0)
    row = fetching.summary()
    assert row.pulls > 3 and row.pulled_tokens > 3 * PIECE_TOKENS
    assert sum(fetching.reused) > sum(alone.reused)
    assert row.late_tokens == row.gone_tokens == row.no_room_tokens == 0
    assert alone.summary().pulls == 0
    # A fleet that lends changes nothing for the other policies.
    assert simulate(trace, lending, "kv", 1, speedup=4.0).ttft_s == alone.ttft_s


def test_a_slow_link_makes_no_first_token_later(tmp_path: Path) -> None:
    trace = conversations(tmp_path)
    fleet = shape(cache_tokens=100_000, cpu_tokens=200_000, workers=4)
    slow = dataclasses.replace(fleet, peer=PeerSpeed(1e6))
    run = simulate(trace, slow, "kv+pull", 1).summary()
    # A few fetches teach the router that the link is slow.
    assert run.pulls < 20 and run.pulled_tokens <= run.late_tokens


def test_the_balance_is_the_busiest_by_the_mean() -> None:
    profile = LoadProfile(4, span_s=120.0)
    profile.add(0.5, [4, 0, 0, 0])
    profile.add(0.7, [0, 4, 0, 0])
    profile.add(10.5, [1, 1, 1, 1])
    profile.add(20.5, [0, 0, 0, 0])
    assert [value for _, value in profile.balance()] == [2.0, 1.0]
    assert profile.mean_balance == 1.5
    assert LoadProfile(2, 0.0).mean_balance == 1.0


def test_a_run_without_answers_has_a_row() -> None:
    row = PolicyRun("kv", 1, (1.0, 1.0), LoadProfile(2, 0.0)).summary()
    assert (row.requests, row.reused_share, row.ttft_p99_s) == (0, 0.0, 0.0)
    assert (row.requests_per_s, row.output_tokens_per_s) == (0.0, 0.0)


def test_throughput_is_counted_until_the_last_answer_ended() -> None:
    """Decode two answers of 50 tokens together, after both prompts; the third request fits no replica."""
    timing = Timing(10_000.0, 0.01, 0.0)
    fleet = FleetShape(geometry_of("llama", PIECE_TOKENS), (ReplicaShape(100, timing=timing),))
    trace = small_trace((0.0, [1, 2]), (0.0, [3, 4]), (0.1, list(range(1, 900))), output_tokens=50)
    run = simulate(trace, fleet, "kv", 1)
    row = run.summary()
    # The second prompt waits for the step of the first, which has its first token then.
    prefill_s = 2 * PIECE_TOKENS / 10_000
    assert row.span_s == pytest.approx(2 * (0.01 + prefill_s) + 49 * 0.01)
    assert row.output_tokens_per_s == pytest.approx(2 * 50 / row.span_s)
    assert row.requests_per_s == pytest.approx(2 / row.span_s)
    interrupted = simulate(trace, restarted(fleet, (0.4, 0)), "kv", 1).summary()
    # The part of an answer from the first try is not counted again.
    assert interrupted.span_s > row.span_s and interrupted.output_tokens_per_s == pytest.approx(
        2 * 50 / interrupted.span_s
    )


def test_the_defaults_are_those_of_the_fleet_benchmark() -> None:
    assert ReplicaShape(1).timing == Timing(10_000.0, 0.015, 0.0004)
    assert REPLICAS == 8
