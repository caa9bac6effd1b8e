# SPDX-License-Identifier: Apache-2.0
"""Traffic of several API keys: three with chats, and an attacker whose many prompts share their beginning."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrouter.replay.fleet.fleet_shape import FleetShape
from kvrouter.replay.runs.policy_run import PolicyRun
from kvrouter.replay.runs.simulate import FOREVER, Simulation
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.simulator.cache.text import PieceText

PIECE_TOKENS = 16
OTHERS, ATTACKER = 3, "attacker"
CHATS, TURNS = 12, 6
# In pieces: the beginning that all chats of a key share, a chat's own text, and the text that each turn adds.
COMMON, OWN, MORE = 16, 96, 4
BEGINNING, END = 256, 16
ATTACK_BEGINS_S, ATTACK_EVERY_S = 30.0, 0.04


def keys_traffic(attacks: int, span_s: float) -> Trace:
    """Return a trace of three keys' chats, and of an attacker's prompts that share their first 4,096 tokens.

    Args:
        attacks: The number of the attacker's prompts.
        span_s: The mean duration of a chat, in seconds.
    """
    ids, rng = itertools.count(1), random.Random(1)
    prompts: list[tuple[float, list[int], str]] = []
    for owner in range(OTHERS):
        common = list(itertools.islice(ids, COMMON))
        for _ in range(CHATS):
            text, time_s = [*common, *itertools.islice(ids, OWN)], rng.uniform(0, 20)
            for _ in range(TURNS):
                prompts.append((time_s, [*text], f"key {owner}"))
                text += itertools.islice(ids, MORE)
                time_s += rng.expovariate(TURNS / span_s)
    beginning = list(itertools.islice(ids, BEGINNING))
    for number in range(attacks):
        time_s = ATTACK_BEGINS_S + number * ATTACK_EVERY_S
        prompts.append((time_s, [*beginning, *itertools.islice(ids, END)], ATTACKER))
    requests = []
    for time_s, text, key in sorted(prompts, key=lambda prompt: prompt[0]):
        pieces = np.array([*text, next(ids)], np.uint64)
        requests.append(Request(time_s, PIECE_TOKENS * (len(pieces) - 1) + 1, 8, pieces, key=key))
    return Trace("keys", "made", PIECE_TOKENS, requests)


class KeysOutcome(NamedTuple):
    """The outcome of one run of this traffic."""

    # Share of the other keys' prompt tokens that were reused.
    others_reuse: float
    # Share of all replicas' blocks that hold the attacker's prompts at the end.
    attacker_blocks: float
    # Number of the attacker's prompts at each replica that got any.
    attacker_places: Counter[int]
    # Indices of the requests of the other keys, and of the attacker.
    others: Sequence[int]
    attacks: Sequence[int]
    policy_run: PolicyRun


def run_keys(trace: Trace, fleet: FleetShape, policy: str) -> KeysOutcome:
    """Run the traffic in virtual time."""
    simulation = Simulation(trace, fleet, policy, 1)
    attacker_hashes: set[int] = set()
    attacks: list[int] = []
    others: list[int] = []
    for number, request in enumerate(trace.requests):
        simulation.arrive(number)
        (attacks if request.key == ATTACKER else others).append(number)
        if request.key == ATTACKER:
            hashes = PieceText.hash_numbers(request.pieces, request.prompt_tokens, PIECE_TOKENS, PIECE_TOKENS)
            attacker_hashes.update(hashes.tolist())
    simulation.advance(FOREVER)
    run = simulation.run
    held_hashes = [block_hash for blocks in simulation.index.held_blocks() for block_hash in blocks.tolist()]
    return KeysOutcome(
        sum(run.reused[n] for n in others) / sum(run.prompt[n] for n in others),
        sum(block_hash in attacker_hashes for block_hash in held_hashes)
        / sum(replica.blocks for replica in fleet.replicas),
        Counter(run.worker[n] for n in attacks),
        others,
        attacks,
        run,
    )
