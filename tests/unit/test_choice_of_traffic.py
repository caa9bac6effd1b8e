# SPDX-License-Identifier: Apache-2.0
"""The choice on traffic that once defeated it, in virtual time: real ingest, mirror, matcher, cost and placing."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest

from kvrouter.replay.fleet.fleet_shape import FleetShape, ReplicaShape, Restart, geometry_of
from kvrouter.replay.runs.policy_run import PolicyRun
from kvrouter.replay.runs.simulate import simulate
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.simulator.engine.timing import Timing

PIECE_TOKENS = 16
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.01)


def chats(count: int, turns: int, common_tokens: int, own_tokens: int, pause_s: float) -> Trace:
    """Chats that share a beginning, turn after turn, one request at a time."""
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
    """Return the share of the prompts' tokens that was reused from one request on."""
    return sum(run.reused[first:]) / sum(run.prompt[first:])


@pytest.mark.parametrize("model", ["gemma3", "llama"])
def test_a_short_common_beginning_does_not_gather_all_chats_on_one_idle_replica(model: str) -> None:
    """18 chats share 128 of their 2,128 tokens; the memory of three replicas holds all of them, that of one does not."""
    trace = chats(18, 3, 128, 2_000, 2.0)
    geometry = geometry_of(model, PIECE_TOKENS)
    blocks = 4_096 if model == "gemma3" else 1_200
    fleet = FleetShape(geometry, (ReplicaShape(blocks, 0, TIMING),) * 3)
    found = {policy: reuse(simulate(trace, fleet, policy, 1), 18) for policy in ("kv", "session_hash", "round_robin")}
    assert found["kv"] > max(found.values()) - 0.03, found


def test_a_popular_beginning_is_copied_when_its_holder_has_a_queue() -> None:
    """A system prompt of 8,192 tokens and short questions: one replica alone is too slow for them, four are not."""
    trace = chats(600, 1, 8_192, 256, 0.014)
    fleet = FleetShape(geometry_of("llama", PIECE_TOKENS), (ReplicaShape(4_096, 0, TIMING),) * 4)
    runs = [simulate(trace, fleet, policy, 1) for policy in ("kv", "lmetric")]
    # Once the copies are there; the first prompts wait for the first of them under every policy.
    kv_s, lmetric_s = (statistics.fmean(run.ttft_s[300:]) for run in runs)
    assert kv_s < 1.25 * lmetric_s and reuse(runs[0], 0) > reuse(runs[1], 0) - 0.03


def test_a_restarted_replica_gets_its_share_of_chats_again_and_not_all() -> None:
    trace = chats(18, 5, 128, 2_000, 2.0)
    restart = Restart(trace.requests[2 * 18].time_s, 1)
    fleet = FleetShape(geometry_of("gemma3", PIECE_TOKENS), (ReplicaShape(4_096, 0, TIMING),) * 3, (restart,))
    found = {policy: reuse(simulate(trace, fleet, policy, 1), 18) for policy in ("kv", "session_hash", "round_robin")}
    assert found["kv"] > max(found.values()) - 0.05, found
