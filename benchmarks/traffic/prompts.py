# SPDX-License-Identifier: Apache-2.0
"""The requests of a shape as a trace, and its fleet. Pure.

A prompt is a path in a tree of pieces: a beginning that others share, a chat's own history, and one part for each turn.
Equal paths get equal ids, so two prompts share exactly the common part of their paths.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from benchmarks.traffic.shape import PIECE_TOKENS, Shape
from kvrouter.replay.fleet.fleet_shape import FleetShape, ReplicaShape, Restart, blocks_of, geometry_of
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.simulator.engine.timing import Timing

# A pool must have room for some of the longest texts at once; otherwise requests wait for blocks that only they hold.
TEXTS_IN_POOL_IDLE = 2
TEXTS_IN_POOL_BUSY = 5
# The depth of a tree of prompts: product, task, customer.
TREE_LEVELS = 3
# Sizes of a CPU tier by the GPU's pool.
TIER_SHARES = (0.5, 1.0, 2.0, 4.0)
# Pools and speeds of unequal workers, by those of equal ones.
POOL_SHARES = (1.0, 1.0, 0.5, 0.25)
SPEED_SHARES = (1.0, 1.0, 0.5, 1 / 3)
# Each decoding sequence's part of a step.
DECODE_SEQUENCE_S = 0.0004
# The pause between two requests of an idle fleet, beside the time that the first of them takes.
PAUSE_S = 0.25
# The time between a chat's turns where the chat does not wait for its answer.
HASTE_S = 0.2
# Requests of one burst come within this time.
BURST_S = 0.05


class Turn(NamedTuple):
    """A request before it has a time."""

    chat: int
    # The ids of its whole pieces and of its last, mostly partial, piece.
    pieces: list[int]
    prompt_tokens: int
    answer_tokens: int


class Pieces:
    """Ids of pieces by their path: an id stands for all pieces before it too."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str], int] = {}

    def child(self, parent: int, label: str) -> int:
        """Return the id of the piece `label` behind the piece `parent`."""
        return self._ids.setdefault((parent, label), len(self._ids) + 1)

    def extend(self, path: list[int], label: str, tokens: int) -> None:
        """Append the ids of a part's whole pieces to a path."""
        for place in range(tokens // PIECE_TOKENS):
            path.append(self.child(path[-1] if path else 0, f"{label}/{place}"))


def trace_and_fleet(shape: Shape) -> tuple[Trace, FleetShape]:
    """Return the requests and the replicas of a shape; equal shapes give equal ones."""
    rng = random.Random(f"{shape.seed}/{shape.number}/{shape.order}/prompts")
    pieces = Pieces()
    turns = _ordered(shape, _chats(shape, pieces, rng), rng)[: shape.requests]
    unique_tokens = PIECE_TOKENS * len({piece for turn in turns for piece in turn.pieces})
    times_s = _times(shape, turns, unique_tokens, rng)
    requests = [
        Request(time_s, turn.prompt_tokens, turn.answer_tokens, np.array(turn.pieces, np.uint64), session=turn.chat)
        for time_s, turn in zip(times_s, turns, strict=True)
    ]
    requests.sort(key=lambda request: request.time_s)
    trace = Trace(shape.name, "drawn", PIECE_TOKENS, requests)
    return trace, _fleet(shape, turns, unique_tokens, trace.span_s, rng)


def _chats(shape: Shape, pieces: Pieces, rng: random.Random) -> list[list[Turn]]:
    """Return chats, each a list of its turns, until there are enough requests."""
    shared_tokens = [_around(rng, shape.shared_tokens) for _ in range(shape.beginnings)]
    weights = [1 / (rank + 1) ** shape.skew for rank in range(shape.beginnings)]
    chats: list[list[Turn]] = []
    count = 0
    while count < shape.requests:
        chat = len(chats)
        share = count / shape.requests
        path = _beginning(shape, pieces, shared_tokens, weights, share, rng)
        if shape.sharing != "documents":
            pieces.extend(path, f"chat{chat}", _around(rng, shape.history_tokens))
        turns = []
        for turn in range(rng.randint(1, shape.turns) if not shape.is_rotation else shape.turns):
            if turn or shape.sharing == "documents":
                pieces.extend(path, f"chat{chat}/{turn}", _around(rng, shape.turn_tokens))
            tail_tokens = rng.randint(1, PIECE_TOKENS - 1)
            last_piece = pieces.child(path[-1] if path else 0, f"end{chat}/{turn}")
            prompt_tokens = len(path) * PIECE_TOKENS + tail_tokens
            turns.append(Turn(chat, [*path, last_piece], prompt_tokens, max(1, _around(rng, shape.answer_tokens))))
            # The answer, and the rest of the last piece, stand before the next turn.
            pieces.extend(path, f"answer{chat}/{turn}", turns[-1].answer_tokens + PIECE_TOKENS)
        chats.append(turns)
        count += len(turns)
    return chats


def _beginning(
    shape: Shape, pieces: Pieces, shared_tokens: list[int], weights: list[float], share: float, rng: random.Random
) -> list[int]:
    """Return the path of a beginning that is drawn by popularity.

    `share` is the part of the run that is over, for the drift of popularity.
    """
    path: list[int] = []
    if shape.sharing == "nothing":
        return path
    drift = int(share * (shape.drifts + 1)) if shape.drifts else 0
    rank = rng.choices(range(shape.beginnings), weights)[0]
    beginning = rank + drift * shape.beginnings
    if shape.sharing != "tree":
        pieces.extend(path, f"beginning{beginning}", shared_tokens[rank])
        return path
    # Ranks close to each other share more levels.
    fan = max(2, round(shape.beginnings ** (1 / TREE_LEVELS)))
    for level in reversed(range(TREE_LEVELS)):
        pieces.extend(path, f"level{level}/{beginning // fan**level}", shape.shared_tokens // TREE_LEVELS)
    return path


def _ordered(shape: Shape, chats: list[list[Turn]], rng: random.Random) -> list[Turn]:
    """Return all turns in the order in which they come; the turns of one chat stay in order."""
    if shape.order in ("rounds", "rotation"):
        rounds = [[chat[turn] for chat in chats if len(chat) > turn] for turn in range(shape.turns)]
        if shape.order == "rounds":
            for turns in rounds:
                rng.shuffle(turns)
        return [turn for turns in rounds for turn in turns]
    placed: list[tuple[float, Turn]] = []
    for chat in chats:
        length = rng.uniform(0.05, 0.6) if shape.order == "mixed" else 1e-6
        begin = rng.uniform(0, 1 - length)
        placed += [(begin + length * turn / len(chat), chat_turn) for turn, chat_turn in enumerate(chat)]
    placed.sort(key=lambda item: item[0])
    return [turn for _, turn in placed]


def _times(shape: Shape, turns: list[Turn], unique_tokens: int, rng: random.Random) -> list[float]:
    """Return the time of each request in seconds, from the first one."""
    rate = shape.prefill_tokens_per_s
    slowest = rate * min(SPEED_SHARES) if shape.feature == "heterogeneous" else rate
    if shape.pace == "idle":
        now_s, times_s = 0.0, []
        for turn in turns:
            times_s.append(now_s)
            now_s += turn.prompt_tokens / slowest + turn.answer_tokens * 2 * shape.step_base_s + PAUSE_S
        return times_s
    # Decoding takes a share of the steps, too.
    work_s = unique_tokens / rate + sum(turn.answer_tokens for turn in turns) * DECODE_SEQUENCE_S
    mean_s = work_s / (len(turns) * shape.workers * shape.load)
    times_s, now_s = [], 0.0
    together = shape.burst_requests if shape.pace == "burst" else 1
    while len(times_s) < len(turns):
        times_s += [now_s + rng.uniform(0, BURST_S) for _ in range(together)] if together > 1 else [now_s]
        now_s += rng.expovariate(1 / (mean_s * together))
    times_s = sorted(times_s[: len(turns)])
    return _in_haste(turns, times_s) if shape.order == "depth" else times_s


def _in_haste(turns: list[Turn], times_s: list[float]) -> list[float]:
    """Let a chat's turns follow each other closely, as if they did not wait for answers."""
    latest: dict[int, float] = {}
    times_in_haste_s = []
    for turn, time_s in zip(turns, times_s, strict=True):
        before = latest.get(turn.chat)
        latest[turn.chat] = time_s if before is None else before + HASTE_S
        times_in_haste_s.append(latest[turn.chat])
    return times_in_haste_s


def _fleet(shape: Shape, turns: list[Turn], unique_tokens: int, span_s: float, rng: random.Random) -> FleetShape:
    """Return the replicas and their restarts."""
    geometry = geometry_of(shape.model, PIECE_TOKENS)
    longest = max(turn.prompt_tokens + turn.answer_tokens for turn in turns) + 2 * PIECE_TOKENS
    least = longest * (TEXTS_IN_POOL_IDLE if shape.pace == "idle" else TEXTS_IN_POOL_BUSY)
    pool_tokens = int(shape.memory_share * unique_tokens / shape.workers)
    tier_share = rng.choice(TIER_SHARES) if shape.feature == "tier" else 0.0
    replicas = []
    for _ in range(shape.workers):
        unequal = shape.feature == "heterogeneous"
        tokens = max(least, int(pool_tokens * (rng.choice(POOL_SHARES) if unequal else 1.0)))
        speed = rng.choice(SPEED_SHARES) if unequal else 1.0
        timing = Timing(
            prefill_tokens_per_s=shape.prefill_tokens_per_s * speed,
            step_base_s=shape.step_base_s / speed,
            decode_sequence_s=DECODE_SEQUENCE_S,
            load_tokens_per_s=10 * shape.prefill_tokens_per_s,
        )
        replicas.append(
            ReplicaShape(blocks_of(geometry, tokens), blocks_of(geometry, int(tokens * tier_share)), timing)
        )
    restarts: tuple[Restart, ...] = ()
    if shape.feature == "restart":
        count = rng.randint(1, max(1, shape.workers // 4))
        restarted = rng.sample(range(shape.workers), count)
        restarts = tuple(Restart(span_s * rng.uniform(0.3, 0.7), worker) for worker in restarted)
    return FleetShape(geometry, tuple(replicas), restarts)


def _around(rng: random.Random, middle_tokens: int) -> int:
    """Draw a length around a middle one, from about a third of it to three times it."""
    return max(1, round(middle_tokens * math.exp(rng.gauss(0, 0.4))))
