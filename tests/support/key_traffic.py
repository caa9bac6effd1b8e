# SPDX-License-Identifier: Apache-2.0
"""Traffic of several API keys: three with chats, and one whose many prompts all begin alike."""

from __future__ import annotations

import itertools
import random

import numpy as np

from kvrouter.replay.traces.request import Request, Trace

PIECE_TOKENS = 16
OTHERS, ATTACKER = 3, "attacker"
CHATS, TURNS = 12, 6
# A chat's beginning, which it shares with those of its key, its own text, and what each turn adds, in pieces.
COMMON, OWN, MORE = 16, 96, 4
BEGINNING, END = 256, 16
ATTACK_BEGINS_S, ATTACK_EVERY_S = 30.0, 0.04


def keys_traffic(attacks: int, span_s: float) -> Trace:
    """Return chats of three keys in this time, and prompts of a fourth one that share their first 4,096 tokens."""
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
