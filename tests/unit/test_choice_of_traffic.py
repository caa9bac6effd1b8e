# SPDX-License-Identifier: Apache-2.0
"""The router's choice on traffic that it once handled badly.

The real ingest, mirror, matcher, cost and placing run in virtual time.
"""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest

from kvrouter.replay.fleet.fleet_shape import FleetShape, ReplicaShape, Restart, geometry_of
from kvrouter.replay.fleet.virtual_fleet import VirtualFleet
from kvrouter.replay.policies.routing import Arrival, EngineLoads, Placed
from kvrouter.replay.policies.this_router import ThisRouter
from kvrouter.replay.runs import simulate as simulation
from kvrouter.replay.runs.policy_run import PolicyRun
from kvrouter.replay.runs.simulate import simulate
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.simulator.engine.timing import Timing
from tests.support.key_traffic import keys_traffic, run_keys

PIECE_TOKENS = 16
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.01)


def chats(count: int, turns: int, common_tokens: int, own_tokens: int, pause_s: float) -> Trace:
    """Return a trace of chats that share a beginning: turn after turn, one request at a time."""
    ids = itertools.count(1)
    common = [next(ids) for _ in range(common_tokens // PIECE_TOKENS)]
    own = [[next(ids) for _ in range(own_tokens // PIECE_TOKENS)] for _ in range(count)]
    requests: list[Request] = []
    for turn in range(turns):
        for chat in range(count):
            if turn:
                own[chat] += [next(ids) for _ in range(4)]
            pieces = np.array([*common, *own[chat], next(ids)], np.uint64)
            tokens = PIECE_TOKENS * (len(pieces) - 1) + 1
            requests.append(Request(pause_s * len(requests), tokens, 4, pieces, session=chat))
    return Trace("chats", "made", PIECE_TOKENS, requests)


def reuse(run: PolicyRun, first: int) -> float:
    """Return the share of the prompts' tokens that was reused, from the request `first` on."""
    return sum(run.reused[first:]) / sum(run.prompt[first:])


@pytest.mark.parametrize("model", ["gemma3", "llama"])
def test_a_short_common_beginning_does_not_gather_all_chats_on_one_idle_replica(model: str) -> None:
    """Let 18 chats share 128 of their 2,128 tokens; all fit in the memory of three replicas, but not of one."""
    trace = chats(18, 3, 128, 2_000, 2.0)
    geometry = geometry_of(model, PIECE_TOKENS)
    blocks = 4_096 if model == "gemma3" else 1_200
    fleet = FleetShape(geometry, (ReplicaShape(blocks, 0, TIMING),) * 3)
    reuse_by_policy = {
        policy: reuse(simulate(trace, fleet, policy, 1), 18) for policy in ("kv", "session_hash", "round_robin")
    }
    assert reuse_by_policy["kv"] > max(reuse_by_policy.values()) - 0.03, reuse_by_policy


def test_a_popular_beginning_is_copied_when_its_holder_has_a_queue() -> None:
    """Send short questions behind a system prompt of 8,192 tokens: too many for one replica, but not for four."""
    trace = chats(600, 1, 8_192, 256, 0.014)
    fleet = FleetShape(geometry_of("llama", PIECE_TOKENS), (ReplicaShape(4_096, 0, TIMING),) * 4)
    runs = [simulate(trace, fleet, policy, 1) for policy in ("kv", "lmetric")]
    # Compare requests after the copies exist; under every policy, the first prompts wait for the first copies.
    kv_s, lmetric_s = (statistics.fmean(run.ttft_s[300:]) for run in runs)
    assert kv_s < 1.25 * lmetric_s and reuse(runs[0], 0) > reuse(runs[1], 0) - 0.03


def test_a_restarted_replica_gets_its_share_of_chats_again_and_not_all() -> None:
    trace = chats(18, 5, 128, 2_000, 2.0)
    restart = Restart(trace.requests[2 * 18].time_s, 1)
    fleet = FleetShape(geometry_of("gemma3", PIECE_TOKENS), (ReplicaShape(4_096, 0, TIMING),) * 3, (restart,))
    reuse_by_policy = {
        policy: reuse(simulate(trace, fleet, policy, 1), 18) for policy in ("kv", "session_hash", "round_robin")
    }
    assert reuse_by_policy["kv"] > max(reuse_by_policy.values()) - 0.05, reuse_by_policy


def documents(requests: int, pause_s: float) -> Trace:
    """Return a trace of short questions, each about one of four long documents at random."""
    ids, rng = itertools.count(1), random.Random(1)
    texts = [[next(ids) for _ in range(6_144 // PIECE_TOKENS)] for _ in range(4)]
    trace_requests: list[Request] = []
    for number in range(requests):
        pieces = np.array([*rng.choice(texts), *[next(ids) for _ in range(8)], next(ids)], np.uint64)
        trace_requests.append(Request(pause_s * number, PIECE_TOKENS * (len(pieces) - 1) + 1, 4, pieces))
    return Trace("documents", "made", PIECE_TOKENS, trace_requests)


def test_documents_that_one_replica_each_answers_with_ease_are_not_copied() -> None:
    """Each document has some 75 prompts, and a pool holds two documents."""
    fleet = FleetShape(geometry_of("llama", PIECE_TOKENS), (ReplicaShape(900, 0, TIMING),) * 4)
    runs = {policy: simulate(documents(300, 0.05), fleet, policy, 1) for policy in ("kv", "cache_aware", "lmetric")}
    reuse_by_policy = {policy: reuse(run, 0) for policy, run in runs.items()}
    assert reuse_by_policy["kv"] > max(reuse_by_policy.values()) - 0.01, reuse_by_policy


def test_one_key_with_one_long_beginning_keeps_to_its_fair_part_of_the_workers() -> None:
    """Fill three of four replicas with the chats of three keys; one replica can answer the fourth key."""
    fleet = FleetShape(geometry_of("llama", PIECE_TOKENS), (ReplicaShape(1_800, 0, TIMING),) * 4)
    alone, attacked = (run_keys(keys_traffic(attacks, 150.0), fleet, "kv") for attacks in (0, 3_000))
    assert attacked.others_reuse > alone.others_reuse - 0.04
    assert max(attacked.attacker_places.values()) > 0.97 * 3_000


class TwoRouters:
    """Two routers of this project that take turns; each knows the other's prompts only from the engines' events."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self._routers = itertools.cycle([ThisRouter(fleet, "kv", seed) for seed in (1, 2)])

    def place(self, arrival: Arrival, pinned: int | None = None) -> Placed:
        return next(self._routers).place(arrival, pinned)

    def tend(self, loads: EngineLoads) -> None:
        next(self._routers).tend(loads)
        next(self._routers).tend(loads)


@pytest.mark.parametrize("model", ["gemma3", "llama"])
def test_two_routers_spread_chats_as_one_does(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chats(18, 3, 128, 2_000, 2.0)
    blocks = 4_096 if model == "gemma3" else 1_200
    fleet = FleetShape(geometry_of(model, PIECE_TOKENS), (ReplicaShape(blocks, 0, TIMING),) * 3)
    single_reuse = reuse(simulate(trace, fleet, "kv", 1), 18)
    monkeypatch.setattr(simulation, "router_of", lambda policy, index, *rest: TwoRouters(index))
    assert reuse(simulate(trace, fleet, "kv", 1), 18) > max(single_reuse, 0.9) - 0.03
