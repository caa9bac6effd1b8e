# SPDX-License-Identifier: Apache-2.0
"""How a worker is picked from those that may take a prompt. Pure; chance is passed in.

`kv` is the router's own: the least cost. The others are what else is done, to compare with; they see the same workers,
and the load is counted under all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

import msgspec

from kvrouter.router.index.matching.question import Hit

KV = "kv"


class PolicyInput(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Who may take a prompt; the lists go together. turn: how many prompts of this model were placed before."""

    hits: Sequence[Hit]
    costs: Sequence[int]
    loads: Sequence[int]
    num_tokens: int
    turn: int


Pick: TypeAlias = Callable[[PolicyInput, Random], int]


def least_cost(contest: PolicyInput, rng: Random) -> int:
    """Among equal costs the nearer tier wins, then chance."""
    least = min(contest.costs)
    if contest.costs.count(least) == 1:
        return contest.costs.index(least)
    hits = contest.hits
    ties = [i for i, cost in enumerate(contest.costs) if cost == least]
    nearest = max([(hits[i].gpu, hits[i].cpu) for i in ties])
    return rng.choice([i for i in ties if (hits[i].gpu, hits[i].cpu) == nearest])


def softened(temperature: float) -> Pick:
    """`least_cost` with sampling: a cost that is higher by temperature * the prompt's length is chosen e times less
    often."""

    def pick(contest: PolicyInput, rng: Random) -> int:
        least = min(contest.costs)
        unit = temperature * contest.num_tokens
        weights = [math.exp((least - cost) / unit) for cost in contest.costs]
        return rng.choices(range(len(weights)), weights)[0]

    return pick


def round_robin(contest: PolicyInput, rng: Random) -> int:
    order = sorted(range(len(contest.hits)), key=lambda i: contest.hits[i].worker)
    return order[contest.turn % len(order)]


def at_random(contest: PolicyInput, rng: Random) -> int:
    return rng.randrange(len(contest.hits))


def least_load(contest: PolicyInput, rng: Random) -> int:
    return _best([-load for load in contest.loads], rng)


def prefix_only(contest: PolicyInput, rng: Random) -> int:
    """The longest hit, whatever is queued there."""
    return _best([(hit.disk, hit.cpu, hit.gpu) for hit in contest.hits], rng)


def full_attention_only(contest: PolicyInput, rng: Random) -> int:
    """The longest run of full attention's blocks, which is what a router sees that knows no other group, and the
    load."""
    return _best(
        [
            -(contest.num_tokens - hit.full_attention + load)
            for hit, load in zip(contest.hits, contest.loads, strict=True)
        ],
        rng,
    )


def _best(keys: Sequence[object], rng: Random) -> int:
    best = max(keys)  # type: ignore[type-var]
    return rng.choice([i for i, key in enumerate(keys) if key == best])


OTHERS: dict[str, Pick] = {
    "round_robin": round_robin,
    "least_load": least_load,
    "random": at_random,
    "prefix_only": prefix_only,
    "full_attention_only": full_attention_only,
}


class Policy(NamedTuple):
    """A way to pick. softened: it samples beyond ties."""

    name: str
    pick: Pick
    softened: bool = False


LEAST_COST = Policy(KV, least_cost)


def policy(name: str, temperature: float = 0.0) -> Policy:
    """The policy of this name, one of NAMES; temperature softens `kv` alone."""
    if name != KV:
        return Policy(name, OTHERS[name])
    return Policy(KV, softened(temperature), softened=True) if temperature > 0 else LEAST_COST
