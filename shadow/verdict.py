# SPDX-License-Identifier: Apache-2.0
"""The verdict on one request: the tokens that its worker reused, and those that any worker held. Pure.

All counts are tokens. An engine's report replaces the index's prediction for the worker. So every verdict has
reused <= there and ours <= there.
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
    """The index's answer to a prompt at one moment."""

    num_tokens: int
    block_tokens: int
    # The hit of each worker whose hit is proven.
    held: Mapping[str, int]
    # The worker that this router would choose.
    ours: str
    # Whether the index answered before the engine served the prompt; afterwards the hits may include the prompt itself.
    is_before: bool


class Verdict(msgspec.Struct, frozen=True):
    """The judgement of one request."""

    num_tokens: int
    # The worker that got the request, and the tokens that it reused; None if the worker is not known.
    worker: str | None
    reused: int | None
    # Whether the engine reported `reused`; otherwise the index predicted it.
    is_reported: bool
    # The index's prediction for the worker; None if it does not count.
    predicted: int | None
    # The most tokens that any worker held, and a worker that held them.
    there: int
    best: str | None
    # Tokens that this router's choice would have reused; None if the index was queried too late for that.
    ours: int | None
    # Whether the index predicted that all but the last block is reused.
    is_whole: bool
    held: Mapping[str, int]


def snapshot_of(answer: Mapping[str, Any], *, is_before: bool) -> Snapshot:
    """Return the snapshot in an answer of `/select` with `explain`.

    Raises Unjudged, and KeyError, TypeError or ValueError for an answer of another shape.
    """
    tokens = answer.get("tokens")
    if tokens is not None and tokens["known_tokens"] < tokens["num_tokens"]:
        raise Unjudged(Skip.TOKENS_UNKNOWN, str(tokens["problem"]))
    held = {}
    for candidate in answer["candidates"]:
        if _is_proven(candidate):
            held[_name(candidate)] = int(candidate["overlap"]["longest_matched"])
    return Snapshot(int(answer["isl_tokens"]), int(answer["block_size"]), held, _name(answer), is_before=is_before)


def judge(snapshot: Snapshot, outcome: Outcome, fleet: FleetNames) -> Verdict:
    """Return the verdict on a request. Raises Unjudged."""
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
    # If several ranks are behind one address, take the one that holds the most: engines send a prompt there if they
    # can.
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
    # If the index held the whole prompt and the engine did not, the engine had served the request before the query.
    if predicted is not None and predicted > cached and _is_whole(snapshot, predicted):
        snapshot = msgspec.structs.replace(snapshot, is_before=False)
    return _verdict(snapshot, held, worker, predicted if snapshot.is_before else None, ours, is_reported=True)


def _verdict(
    snapshot: Snapshot, held: dict[str, int], worker: str | None, predicted: int | None, ours: str, *, is_reported: bool
) -> Verdict:
    there = max(held.values(), default=0)
    reused = None if worker is None else held[worker]
    best = min((name for name, tokens in held.items() if tokens == there), default=None)
    return Verdict(
        snapshot.num_tokens,
        worker,
        reused,
        is_reported,
        predicted,
        there,
        worker if reused == there else best,
        held.get(ours, 0) if snapshot.is_before else None,
        is_whole=not is_reported and reused is not None and _is_whole(snapshot, reused),
        held=held,
    )


def _is_whole(snapshot: Snapshot, tokens: int) -> bool:
    return snapshot.num_tokens - tokens <= snapshot.block_tokens


def _is_proven(candidate: Mapping[str, Any]) -> bool:
    """Return whether a candidate's hit rests on its events: a zero with a reason may be no credit."""
    if candidate.get("approximate") or candidate["state"] not in CREDITED:
        return False
    return not candidate.get("reason") or candidate["overlap"]["longest_matched"] > 0


def _name(worker: Mapping[str, Any]) -> str:
    return route_name(str(worker["worker_id"]), int(worker["dp_rank"]))
