# SPDX-License-Identifier: Apache-2.0
"""Claim: a worker that comes back with an empty cache draws no herd, and first tokens come about as soon as before.

Chats of four turns begin at random; three simulated replicas hold them all. One of them restarts, and the 30 s before
are compared with the 30 s after, over some seeds: in a single run, p99 would be the third longest of some 250 first
tokens. The run is in virtual time, so the machine does not matter.

    python -m benchmarks.choice_restart [--rate CHATS_PER_S]... [--seeds N] [--policy NAME]...
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from benchmarks.report import parser_of
from benchmarks.traffic.outcome import mean
from benchmarks.traffic.prompts import Pieces
from benchmarks.traffic.shape import PIECE_TOKENS
from kvrouter.replay.fleet.fleet_shape import FleetShape, ReplicaShape, Restart, blocks_of, geometry_of
from kvrouter.replay.policies.names import NAMES
from kvrouter.replay.runs.simulate import simulate
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.simulator.engine.timing import Timing

# The world `restart` of choice_live.py.
REPLICAS, POOL_TOKENS = 3, 262_144
SHARED_TOKENS, PRIVATE_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 128, 2_000, 240, 16
TURNS, TURN_EVERY_S = 4, 4.5
TIMING = Timing(prefill_tokens_per_s=5_000.0, step_base_s=0.007, decode_sequence_s=0.0004, load_tokens_per_s=50_000.0)
RESTART_S, WINDOW_S, SPAN_S = 90.0, 30.0, 120.0
FRESH = 0
POLICIES = ("kv", "session_hash", "dynamo", "lmetric", "cache_aware", "least_load", "round_robin")


def chats(rng: random.Random, chats_per_s: float) -> Trace:
    """Return chats that begin at random times, at this rate."""
    pieces, requests, begins_s, chat = Pieces(), [], 0.0, 0
    while (begins_s := begins_s + rng.expovariate(chats_per_s)) < SPAN_S:
        path: list[int] = []
        pieces.extend(path, "shared", SHARED_TOKENS)
        pieces.extend(path, f"chat{chat}", PRIVATE_TOKENS)
        for turn in range(TURNS):
            if turn:
                pieces.extend(path, f"chat{chat}/{turn}", TURN_TOKENS)
            last = pieces.child(path[-1], f"end{chat}/{turn}")
            prompt_tokens = len(path) * PIECE_TOKENS + rng.randint(1, PIECE_TOKENS - 1)
            ids = np.array([*path, last], np.uint64)
            requests.append(Request(begins_s + turn * TURN_EVERY_S, prompt_tokens, ANSWER_TOKENS, ids, session=chat))
        chat += 1
    requests = [request for request in requests if request.time_s < SPAN_S]
    requests.sort(key=lambda request: request.time_s)
    return Trace("restart", "drawn", PIECE_TOKENS, requests)


def row(policy: str, chats_per_s: float, seeds: int) -> list[str]:
    """Return the table's row for a policy at one rate, over this many seeds."""
    geometry = geometry_of("gemma3", PIECE_TOKENS)
    replica = ReplicaShape(blocks_of(geometry, POOL_TOKENS), 0, TIMING)
    fleet = FleetShape(geometry, (replica,) * REPLICAS, (Restart(RESTART_S, FRESH),))
    before_s: list[float] = []
    after_s: list[float] = []
    shares: list[float] = []
    for seed in range(seeds):
        trace = chats(random.Random(seed), chats_per_s)
        run = simulate(trace, fleet, policy, 1)
        seen_sessions, workers_of_new_chats = set(), []
        for request, worker, ttft_s in zip(trace.requests, run.worker, run.ttft_s, strict=True):
            if RESTART_S - WINDOW_S <= request.time_s < RESTART_S:
                before_s.append(ttft_s)
            elif request.time_s >= RESTART_S:
                after_s.append(ttft_s)
                if request.session not in seen_sessions:
                    workers_of_new_chats.append(worker)
            seen_sessions.add(request.session)
        shares.append(workers_of_new_chats.count(FRESH) * REPLICAS / len(workers_of_new_chats))
    means = [mean(times_s) for times_s in (before_s, after_s)]
    p99s = [float(np.percentile(times_s, 99)) for times_s in (before_s, after_s)]
    return [
        policy,
        f"{chats_per_s:g}",
        f"{means[0]:.3f}, {means[1]:.3f}",
        f"{p99s[0]:.3f}, {p99s[1]:.3f}",
        f"{p99s[1] / p99s[0]:.2f}",
        f"{mean(shares):.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, action="append", help="chats that begin in a second; default: 2, 3, 4")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--policy", action="append", choices=NAMES, help="default: kv and six peers")
    options = parser.parse_args(arguments)
    print("| policy | chats/s | first token, mean s | p99 s | p99 after by before | new chats of the fresh one |")
    print("|---|---|---|---|---|---|")
    for chats_per_s in options.rate or (2.0, 3.0, 4.0):
        for policy in options.policy or POLICIES:
            print(f"| {' | '.join(row(policy, chats_per_s, options.seeds))} |", flush=True)


if __name__ == "__main__":
    main()
