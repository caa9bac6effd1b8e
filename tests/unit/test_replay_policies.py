# SPDX-License-Identifier: Apache-2.0
"""Rules of each family of policies, on situations made by hand: the picked worker, and why the others are not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvrouter.replay.fleet.virtual_fleet import VirtualFleet
from kvrouter.replay.policies.cache_aware import CacheAware
from kvrouter.replay.policies.dynamo import Dynamo
from kvrouter.replay.policies.llm_d import LlmD
from kvrouter.replay.policies.lmetric import LMetric
from kvrouter.replay.policies.names import COMPARED, NAMES, RULES, router_of
from kvrouter.replay.policies.peer import InFlight, PeerRouter, Rule, Sight
from kvrouter.replay.policies.prefix_tree import PrefixTree
from kvrouter.replay.policies.routing import Arrival
from kvrouter.replay.policies.session_hash import SessionHash
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.simulator.cache.shapes import make_geometry

BLOCK = 16


def sight(
    hits: Sequence[int] = (0, 0),
    *,
    tokens: int = 10 * BLOCK,
    requests: Sequence[int] = (0, 0),
    prefill: Sequence[int] = (0, 0),
    waiting: Sequence[int] = (0, 0),
    usage: Sequence[float] = (0.0, 0.0),
    exact: Sequence[int] | None = None,
    first_block: int = 0,
    now_s: float = 0.0,
    session: int | None = None,
) -> Sight:
    """Return what a policy sees of a prompt of ten blocks before two workers."""
    blocks = list(range(first_block, first_block + tokens // BLOCK))
    return Sight(
        now_s,
        tokens,
        np.array(blocks, np.uint64),
        blocks,
        BLOCK,
        hits,
        hits if exact is None else exact,
        [InFlight(*counts) for counts in zip(requests, prefill, strict=True)],
        lambda: [EngineLoad(w, 0, u) for w, u in zip(waiting, usage, strict=True)],
        session,
    )


def picks(rule: Rule, what: Sight, times: int = 40) -> set[int]:
    rng = random.Random(1)
    return {rule.pick(what, rng) for _ in range(times)}


# -- Dynamo: max(0, prefill - overlap) + decode, in blocks


def test_dynamo_weighs_cached_and_queued_blocks_alike() -> None:
    assert picks(Dynamo(2), sight((5 * BLOCK, 0), prefill=(4 * BLOCK, 0))) == {0}
    assert picks(Dynamo(2), sight((5 * BLOCK, 0), prefill=(5 * BLOCK, 0))) == {0, 1}
    assert picks(Dynamo(2), sight((5 * BLOCK, 0), prefill=(6 * BLOCK, 0))) == {1}


def test_dynamo_counts_each_running_block_once_and_forgets_those_that_ended() -> None:
    rule = Dynamo(2)
    same, other_prompt = sight(), sight(first_block=100)
    rule.placed(same, 0)
    rule.placed(same, 0)
    # Worker 0 runs ten blocks, and this prompt has the same ones, so both workers would have ten.
    assert picks(rule, same) == {0, 1}
    assert picks(rule, other_prompt) == {1}
    rule.done(same.blocks, 0)
    assert picks(rule, other_prompt) == {1}
    rule.done(same.blocks, 0)
    assert picks(rule, other_prompt) == {0, 1}


# -- llm-d: 2 * queue + 2 * (1 - usage) + 3 * match


def test_llm_d_prefers_a_whole_match_to_the_shortest_queue() -> None:
    assert picks(LlmD(), sight((10 * BLOCK, 0), waiting=(5, 0))) == {0}
    # 3 * 0.6 is below the 2 of the queue.
    assert picks(LlmD(), sight((6 * BLOCK, 0), waiting=(1, 0))) == {1}
    assert picks(LlmD(), sight((6 * BLOCK, 0), waiting=(1, 1))) == {0}


def test_llm_d_prefers_the_emptier_cache_of_equals() -> None:
    assert picks(LlmD(), sight(usage=(0.5, 0.4))) == {1}
    assert picks(LlmD(), sight()) == {0, 1}


# -- vllm-router: the longest match, nothing else


def test_vllm_router_follows_the_longest_match_whatever_the_load() -> None:
    assert picks(vllm_router(), sight((BLOCK, 0), requests=(1000, 0))) == {0}
    assert picks(vllm_router(), sight((BLOCK, BLOCK))) == {1}


def test_vllm_router_takes_the_fewest_requests_without_any_match() -> None:
    assert picks(vllm_router(), sight(requests=(2, 1))) == {1}
    assert picks(vllm_router(), sight(requests=(1, 1))) == {0}


def test_vllm_router_counts_what_it_sent_for_two_seconds() -> None:
    rule = vllm_router()
    rule.placed(sight(), 0)
    assert picks(rule, sight(requests=(5, 0), now_s=1.9)) == {0}
    assert picks(rule, sight(requests=(5, 0), now_s=2.0)) == {1}


def vllm_router() -> Rule:
    return RULES["vllm_router"](2, BLOCK)


# -- LMetric: uncached tokens * (requests + 1)


def test_lmetric_multiplies_tokens_by_requests() -> None:
    assert picks(LMetric(), sight((6 * BLOCK, 0), requests=(1, 0))) == {0}
    assert picks(LMetric(), sight((5 * BLOCK, 0), requests=(1, 0))) == {0, 1}
    assert picks(LMetric(), sight((4 * BLOCK, 0), requests=(1, 0))) == {1}


def test_lmetric_sees_full_attention_alone_unless_it_is_the_exact_one() -> None:
    situation = sight((8 * BLOCK, 0), exact=(0, 4 * BLOCK))
    assert picks(LMetric(), situation) == {0}
    assert picks(LMetric(exact=True), situation) == {1}


# -- session hash: the highest random weight


def test_a_session_keeps_its_worker_whatever_is_cached_and_queued() -> None:
    rule = SessionHash(2)
    for session in range(20):
        (home,) = picks(rule, sight(session=session))
        busy = [0, 0]
        busy[home] = 1000
        assert picks(rule, sight((0, 10 * BLOCK)[:: 1 - 2 * home], session=session, first_block=7, requests=busy)) == {
            home
        }


def test_sessions_are_spread_evenly_and_few_move_to_a_further_worker() -> None:
    homes = {
        workers: [SessionHash(workers).pick(sight(session=n), random.Random(1)) for n in range(4000)]
        for workers in (7, 8)
    }
    counts = np.bincount(homes[8])
    assert len(counts) == 8 and counts.min() > 400 and counts.max() < 600
    moved = {new for old, new in zip(homes[7], homes[8], strict=True) if old != new}
    assert moved == {7}


def test_a_request_without_a_session_goes_by_its_first_piece() -> None:
    rule = SessionHash(64)
    (home,) = picks(rule, sight(first_block=3))
    assert picks(rule, sight(first_block=3, tokens=4 * BLOCK)) == {home}
    assert len({rule.pick(sight(first_block=n), random.Random(1)) for n in range(30)}) > 20
    # The id of its piece is no session of the same number.
    assert [n for n in range(30) if picks(rule, sight(session=n)) != picks(rule, sight(first_block=n))]


# -- cache-aware by text


def test_cache_aware_follows_what_it_sent_above_the_threshold() -> None:
    rule = CacheAware(2, BLOCK)
    assert picks(rule, sight(requests=(1, 0))) == {1}
    rule.placed(sight(tokens=4 * BLOCK), 1)
    # 4 of 10 pieces are above the threshold of 0.3, and 3 are not.
    assert picks(rule, sight(requests=(0, 60))) == {1}
    rule = CacheAware(2, BLOCK)
    rule.placed(sight(tokens=3 * BLOCK), 1)
    assert picks(rule, sight(requests=(0, 60))) == {0}


def test_cache_aware_gives_way_to_a_load_that_is_out_of_balance() -> None:
    rule = CacheAware(2, BLOCK)
    rule.placed(sight(), 1)
    assert picks(rule, sight(requests=(0, 64))) == {1}
    assert picks(rule, sight(requests=(0, 65))) == {0}
    assert picks(rule, sight(requests=(130, 195))) == {1}
    assert picks(rule, sight(requests=(130, 196))) == {0}


def test_a_prefix_tree_forgets_the_leaves_that_were_used_longest_ago() -> None:
    tree = PrefixTree(2, pieces_max=3)
    tree.insert([1, 2, 3], 0)
    tree.insert([1, 4], 0)
    tree.insert([1, 2, 3], 1)
    assert tree.match([1, 2, 3, 9]) == (3, 1)
    tree.evict()
    assert tree.match([1, 4]) == (2, 0)
    # The leaf of worker 0 went; worker 1 still has it.
    assert tree.match([1, 2, 3]) == (3, 1)
    tree.insert([5, 6, 7], 1)
    tree.evict()
    assert tree.match([1, 2, 3]) == (2, 0)
    assert tree.match([8]) == (0, None)


# -- all of them


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_places_and_ends_requests_and_counts_none_that_ended(name: str) -> None:
    fleet = VirtualFleet(make_geometry("gpt-oss", block_size=BLOCK), 3)
    router = router_of(name, fleet, 1, BLOCK)
    ids = np.arange(1, 5, dtype=np.uint64)
    placed = []
    for number in range(12):
        fleet.now_s = number * 0.1
        router.tend(lambda: [EngineLoad(0, 0, 0.0)] * 3)
        placed.append(router.place(Arrival(ids + np.uint64(100 * number), ids, 4 * BLOCK, 8)))
    assert {placement.number for placement in placed} <= {0, 1, 2}
    for placement in placed:
        placement.first_token()
        placement.done(8)
    router.place(Arrival(ids, ids, 4 * BLOCK, 8), 2).done(None)
    if isinstance(router, PeerRouter):
        assert [(load.requests, load.prefill_tokens) for load in router.in_flight] == [(0, 0)] * 3


def test_every_compared_policy_exists() -> None:
    assert set(COMPARED) <= set(NAMES)
