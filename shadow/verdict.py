# SPDX-License-Identifier: Apache-2.0
"""One request judged: what its worker reused, and what was there. Pure. All counts are tokens.

What an engine reports replaces what the index predicts for its worker, so the law holds for every verdict:
reused <= there, and ours <= there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrouter.router.base.common.ids import route_name
from kvrouter.router.model.workers.stream_state import CREDITED
from kvrouter.shadow.observation import Outcome, Skip, Unjudged
from kvrouter.shadow.worker_names import FleetNames


class Snapshot(msgspec.Struct, frozen=True):
    """What the index said of a prompt at one moment. held: by worker, what it would reuse; without those of which
    nothing is proven. ours: the worker that this router would choose. is_before: the prompt had not been served yet."""

    num_tokens: int
    block_tokens: int
    held: Mapping[str, int]
    ours: str
    is_before: bool


class Verdict(msgspec.Struct, frozen=True):
    """worker: that got it, and its `reused` tokens; None: not known. reported: these are the engine's. predicted: by the
    index, None where it does not count. best: a worker that held `there` tokens, the most. ours: what this router's
    choice would have reused, None where it was queried too late for that. is_whole: the index predicted that all but its
    last block is reused."""

    num_tokens: int
    worker: str | None
    reused: int | None
    is_reported: bool
    predicted: int | None
    there: int
    best: str | None
    ours: int | None
    is_whole: bool
    held: Mapping[str, int]


def snapshot_of(answer: Mapping[str, Any], *, is_before: bool) -> Snapshot:
    """From an answer of `/select` with `explain`. Raises Unjudged; KeyError and TypeError for another shape."""
    tokens = answer.get("tokens")
    if tokens is not None and tokens["known_tokens"] < tokens["num_tokens"]:
        raise Unjudged(Skip.TOKENS_UNKNOWN, str(tokens["problem"]))
    held = {}
    for candidate in answer["candidates"]:
        if _is_proven(candidate):
            held[_name(candidate)] = int(candidate["overlap"]["disk"])
    return Snapshot(int(answer["isl_tokens"]), int(answer["block_size"]), held, _name(answer), is_before=is_before)


def judge(snapshot: Snapshot, outcome: Outcome, fleet: FleetNames) -> Verdict:
    """Raises Unjudged."""
    held, cached = dict(snapshot.held), outcome.cached_tokens
    if outcome.prompt_tokens not in (None, snapshot.num_tokens):
        raise Unjudged(Skip.LENGTH, f"{outcome.prompt_tokens} by the engine, {snapshot.num_tokens} by the router")
    if cached is not None and cached > snapshot.num_tokens:
        raise Unjudged(Skip.LENGTH, f"{cached} cached of {snapshot.num_tokens} tokens")
    if outcome.worker is None:
        if cached is not None:
            raise Unjudged(Skip.UNNAMED_WORKER)
        return _verdict(snapshot, held, None, None, snapshot.ours, is_reported=False)
    ranks = fleet.ranks(outcome.worker)
    if not ranks:
        raise Unjudged(Skip.UNKNOWN_WORKER, outcome.worker)
    # Of several ranks behind one address, that which holds the most: engines send a prompt there where they can.
    worker = max(sorted(ranks), key=lambda rank: held.get(rank, -1))
    predicted = held.get(worker)
    if cached is None:
        if predicted is None:
            raise Unjudged(Skip.NO_CREDIT, worker)
        return _verdict(snapshot, held, worker, predicted, snapshot.ours, is_reported=False)
    for rank in ranks:
        held.pop(rank, None)
    held[worker] = cached
    ours = worker if snapshot.ours in ranks else snapshot.ours
    # Where the index had it whole and the engine did not, the engine was faster than the question.
    if predicted is not None and predicted > cached and _is_whole(snapshot, predicted):
        snapshot = msgspec.structs.replace(snapshot, is_before=False)
    return _verdict(snapshot, held, worker, predicted if snapshot.is_before else None, ours, is_reported=True)


def _verdict(
    snapshot: Snapshot, held: dict[str, int], worker: str | None, predicted: int | None, ours: str, *, is_reported: bool
) -> Verdict:
    there = max(held.values(), default=0)
    reused = None if worker is None else held[worker]
    most = min((name for name, tokens in held.items() if tokens == there), default=None)
    return Verdict(
        snapshot.num_tokens,
        worker,
        reused,
        is_reported,
        predicted,
        there,
        worker if reused == there else most,
        held.get(ours, 0) if snapshot.is_before else None,
        is_whole=not is_reported and reused is not None and _is_whole(snapshot, reused),
        held=held,
    )


def _is_whole(snapshot: Snapshot, tokens: int) -> bool:
    return snapshot.num_tokens - tokens <= snapshot.block_tokens


def _is_proven(candidate: Mapping[str, Any]) -> bool:
    """Whether its hit rests on its events: a zero with a reason may be no credit."""
    if candidate.get("approximate") or candidate["state"] not in CREDITED:
        return False
    return not candidate.get("reason") or candidate["overlap"]["disk"] > 0


def _name(worker: Mapping[str, Any]) -> str:
    return route_name(str(worker["worker_id"]), int(worker["dp_rank"]))
