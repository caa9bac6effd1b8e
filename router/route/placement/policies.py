# SPDX-License-Identifier: Apache-2.0
"""The policies by which a worker is picked from those that may take a prompt. Pure; the generator is passed in.

`kv`, the least cost, is the router's own policy. The others exist for comparison; they see the same workers, and load
is counted under all of them.
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
    """The workers that may take a prompt. The lists have one entry for each worker, in the same order."""

    hits: Sequence[Hit]
    costs: Sequence[int]
    loads: Sequence[int]
    num_tokens: int
    # How many prompts of this model were placed before.
    turn: int


# Returns the place of the picked worker in the lists of its input.
Pick: TypeAlias = Callable[[PolicyInput, Random], int]


def least_cost(contest: PolicyInput, rng: Random) -> int:
    """Pick a worker of the lowest cost; among equals those with the nearest tiers win, then one at random."""
    least = min(contest.costs)
    if contest.costs.count(least) == 1:
        return contest.costs.index(least)
    hits = contest.hits
    ties = [i for i, cost in enumerate(contest.costs) if cost == least]
    nearest = max([hits[i].by_tier[:-1] for i in ties])
    return rng.choice([i for i in ties if hits[i].by_tier[:-1] == nearest])


def softened(temperature: float) -> Pick:
    """Return a policy that samples by cost.

    A worker whose cost is higher by `temperature` times the prompt's length is picked e times less often.
    """

    def pick(contest: PolicyInput, rng: Random) -> int:
        least = min(contest.costs)
        unit = temperature * contest.num_tokens
        weights = [math.exp((least - cost) / unit) for cost in contest.costs]
        return rng.choices(range(len(weights)), weights)[0]

    return pick


def round_robin(contest: PolicyInput, rng: Random) -> int:
    """Pick each worker in turn, in the order of their keys."""
    order = sorted(range(len(contest.hits)), key=lambda i: contest.hits[i].worker)
    return order[contest.turn % len(order)]


def at_random(contest: PolicyInput, rng: Random) -> int:
    """Pick any worker with the same probability."""
    return rng.randrange(len(contest.hits))


def least_load(contest: PolicyInput, rng: Random) -> int:
    """Pick one of the least loaded workers, whatever they hold of the prompt."""
    return _best([-load for load in contest.loads], rng)


def prefix_only(contest: PolicyInput, rng: Random) -> int:
    """Pick one of the workers with the longest hit, whatever is queued there."""
    return _best([hit.by_tier[::-1] for hit in contest.hits], rng)


def full_attention_only(contest: PolicyInput, rng: Random) -> int:
    """Pick a worker by its load and its run of full-attention blocks alone.

    This is all that a router sees that does not know any other group.
    """
    return _best(
        [
            -(contest.num_tokens - hit.full_attention + load)
            for hit, load in zip(contest.hits, contest.loads, strict=True)
        ],
        rng,
    )


def _best(keys: Sequence[object], rng: Random) -> int:
    """Return the index of one of the largest keys, chosen at random."""
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
    """A named way to pick a worker."""

    name: str
    pick: Pick
    # Whether it picks at random even if the costs differ, a cheaper worker more often.
    softened: bool = False


LEAST_COST = Policy(KV, least_cost)


def policy(name: str, temperature: float = 0.0) -> Policy:
    """Return the policy of this name, KV or a key of OTHERS; a temperature above 0 softens KV alone."""
    if name != KV:
        return Policy(name, OTHERS[name])
    return Policy(KV, softened(temperature), softened=True) if temperature > 0 else LEAST_COST
