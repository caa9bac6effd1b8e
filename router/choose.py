# SPDX-License-Identifier: Apache-2.0
"""Which worker takes a prompt: the one that has the fewest tokens left to compute.

Pure: hits in, choice out; chance is passed in. Costs and loads are in tokens, lower wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from kvrouter.router.question import Hit


class Candidate(msgspec.Struct, frozen=True):
    """One worker in a choice. cost: tokens it would compute; load: tokens it has queued (0 until load is known)."""

    hit: Hit
    cost: int
    load: int = 0


class Choice(msgspec.Struct, frozen=True):
    """The chosen worker, a sentence why, and everything that was compared, best first."""

    hit: Hit
    url: str | None
    reason: str
    candidates: tuple[Candidate, ...]


def choose(hits: Sequence[Hit], num_tokens: int, urls: dict[str, str | None], rng: Random) -> Choice:
    """The cheapest of `hits`, which must not be empty. Among equal costs the nearer tier wins, then chance.

    urls: by worker_id and rank as `route_name` gives them.
    """
    candidates = [Candidate(hit, num_tokens - hit.disk) for hit in hits]
    # Chance first, then a stable sort: ties must not always go to the same replica.
    rng.shuffle(candidates)
    candidates.sort(key=lambda c: (c.cost + c.load, -c.hit.gpu, -c.hit.cpu))
    best = candidates[0]
    return Choice(best.hit, urls.get(route_name(best.hit)), _reason(candidates, num_tokens), tuple(candidates))


def route_name(hit: Hit) -> str:
    """`w0`, or `w0@3` for another rank than 0."""
    worker = hit.worker
    return worker.worker_id if worker.dp_rank == 0 else f"{worker.worker_id}@{worker.dp_rank}"


def _reason(candidates: Sequence[Candidate], num_tokens: int) -> str:
    best = candidates[0]
    hit = best.hit
    ties = sum(
        c.cost + c.load == best.cost + best.load and (c.hit.gpu, c.hit.cpu) == (hit.gpu, hit.cpu) for c in candidates
    )
    if hit.disk == 0:
        text = f"no worker holds a reusable prefix of the {num_tokens} tokens"
    elif hit.approximate:
        text = f"approximate: {hit.disk} of {num_tokens} tokens were sent there before"
    else:
        tiers = [f"{hit.gpu} on the GPU"]
        if hit.cpu > hit.gpu:
            tiers.append(f"{hit.cpu - hit.gpu} more from the CPU tier")
        if hit.disk > hit.cpu:
            tiers.append(f"{hit.disk - hit.cpu} more from storage")
        text = f"reuses {hit.disk} of {num_tokens} tokens ({', '.join(tiers)})"
    if ties > 1:
        return f"{text}; chosen at random among {ties} equals"
    return text
