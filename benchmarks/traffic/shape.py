# SPDX-License-Identifier: Apache-2.0
"""One shape of traffic: pace, sharing, lengths, fleet. Drawn from a seed within its stratum. Pure.

A draw is stratified: the number of a shape fixes its class of pace, sharing, fleet size and special feature, so that
every class has its quota (`QUOTA`) in any 210 shapes in a row. Everything else comes from the seed.
"""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

Pace = Literal["idle", "busy", "burst", "saturated"]
Sharing = Literal["system", "tenants", "tree", "documents", "nothing"]
Order = Literal["mixed", "rounds", "depth", "rotation"]
Feature = Literal["", "tier", "heterogeneous", "restart"]

# The least number of shapes of each class in a report.
QUOTA = 20
# Each entry of PACES, FEATURES and FLEETS comes once in as many shapes as its tuple is long. These lengths have no
# common factor, so that in 210 shapes each class meets each other class: 10 paces, 7 features and 3 fleet sizes; the
# kinds of sharing follow the tens.
PACES: tuple[Pace, ...] = ("idle",) * 4 + ("busy",) * 3 + ("burst",) * 2 + ("saturated",)
SHARINGS: tuple[Sharing, ...] = ("system", "tenants", "tree", "documents", "nothing", "system", "tenants")
FEATURES: tuple[Feature, ...] = ("tier", "heterogeneous", "restart", "", "", "", "")
FLEETS = ((2, 3, 4), (8,), (16, 16, 16, 16, 32, 64))
ORDERS: tuple[Order, ...] = ("mixed", "mixed", "rounds", "depth")
# deepseek-v4 is left out: it hashes 8 tokens at a time, which takes ten times as long to simulate.
MODELS = ("gemma3", "gpt-oss", "qwen3-next", "llama4", "llama")
# The tokens of a piece. The common part of two prompts ends where a piece does, and blocks are as large.
PIECE_TOKENS = 128
# The range of requests of a small fleet; a larger fleet gets REQUESTS_PER_WORKER.
REQUESTS = (200, 360)
REQUESTS_PER_WORKER = 10
# The shortest and the longest beginning that prompts share, private history, later turn, and answer, in tokens.
SHARED_TOKENS = (128, 16_384)
DOCUMENT_TOKENS = (1_024, 16_384)
HISTORY_TOKENS = (128, 12_288)
TURN_TOKENS = (32, 2_048)
ANSWER_TOKENS = (8, 384)


class Shape(msgspec.Struct, frozen=True):
    """One shape of traffic and its fleet, with sizes in tokens."""

    seed: int
    number: int
    pace: Pace
    sharing: Sharing
    order: Order
    feature: Feature
    model: str
    workers: int
    requests: int
    # The most turns that a chat has.
    turns: int
    # Different beginnings that prompts share, and how uneven their popularity is (Zipf's exponent).
    beginnings: int
    skew: float
    # How many times the popular beginnings are replaced by others during the run.
    drifts: int
    # The middle of the lengths; the lengths of each prompt are drawn around them.
    shared_tokens: int
    history_tokens: int
    turn_tokens: int
    answer_tokens: int
    # The memory of all workers, by the memory of all prompts if each piece were kept once.
    memory_share: float
    # The share of the fleet's time that computing each piece once takes.
    load: float
    # The requests of a burst.
    burst_requests: int
    prefill_tokens_per_s: float
    step_base_s: float

    @property
    def name(self) -> str:
        """A name that people recognise."""
        parts = [self.pace, self.sharing, self.order, self.model, f"{self.workers}w", self.feature]
        return f"{self.number:03d}-" + "-".join(part for part in parts if part)

    @property
    def is_rotation(self) -> bool:
        """Whether the shape belongs to the class that is reported separately."""
        return self.order == "rotation"

    @property
    def size_class(self) -> str:
        """The class of the fleet's size."""
        return "2-4" if self.workers <= 4 else "8" if self.workers == 8 else "16-64"


def classes(shape: Shape) -> tuple[str, ...]:
    """Return the classes that a report groups this shape by."""
    if shape.is_rotation:
        return ("rotation",)
    names = [shape.pace, f"sharing: {shape.sharing}", f"{shape.size_class} replicas"]
    if shape.feature:
        names.append({"tier": "CPU tier"}.get(shape.feature, shape.feature))
    if shape.order == "depth":
        names.append("turns in haste")
    if shape.drifts:
        names.append("drift")
    return tuple(names)


def draw(seed: int, number: int) -> Shape:
    """Return the shape with this number, from 0 on, of the report with this seed."""
    rng = random.Random(f"{seed}/{number}")
    pace = PACES[number % len(PACES)]
    sharing = SHARINGS[number // len(PACES) % len(SHARINGS)]
    workers = rng.choice(FLEETS[number % len(FLEETS)])
    feature = FEATURES[number % len(FEATURES)]
    requests = max(rng.randint(*REQUESTS), REQUESTS_PER_WORKER * workers)
    beginnings = {"system": 1, "nothing": 1}.get(sharing, round(_between(rng, 3, max(6, 2 * workers))))
    return Shape(
        seed=seed,
        number=number,
        pace=pace,
        sharing=sharing,
        order=rng.choice(ORDERS),
        feature=feature,
        model=rng.choice(MODELS),
        workers=workers,
        requests=requests,
        turns=1 if sharing == "documents" else rng.choice((1, 2, 3, 4, 6, 8)),
        beginnings=beginnings,
        skew=rng.choice((0.0, 0.6, 1.0, 1.3)),
        drifts=rng.choice((0, 0, 0, 2)) if beginnings > 1 else 0,
        shared_tokens=round(_between(rng, *(DOCUMENT_TOKENS if sharing == "documents" else SHARED_TOKENS))),
        history_tokens=round(_between(rng, *HISTORY_TOKENS)),
        turn_tokens=round(_between(rng, *TURN_TOKENS)),
        answer_tokens=round(_between(rng, *ANSWER_TOKENS)),
        memory_share=_between(rng, 0.3, 4.0),
        load={"idle": 0.0, "busy": rng.uniform(0.3, 0.9), "burst": rng.uniform(0.1, 0.5), "saturated": 3.0}[pace],
        burst_requests=rng.choice((4, 8, 16, 32)),
        prefill_tokens_per_s=_between(rng, 2_000, 12_000),
        step_base_s=_between(rng, 0.006, 0.015),
    )


def draw_rotation(seed: int, number: int) -> Shape:
    """Return a strict rotation over pools that are a little too small: a class of its own, beside those of `draw`."""
    rng = random.Random(f"{seed}/rotation/{number}")
    usual = draw(seed, number)
    return msgspec.structs.replace(
        usual,
        pace="idle",
        sharing="system",
        order="rotation",
        feature="",
        workers=rng.choice((2, 3, 4, 8)),
        requests=rng.randint(*REQUESTS),
        turns=rng.choice((4, 6, 8)),
        beginnings=1,
        drifts=0,
        load=0.0,
        memory_share=rng.uniform(0.6, 0.95),
    )


def _between(rng: random.Random, least: float, most: float) -> float:
    """Draw a value whose logarithm is uniform."""
    return math.exp(rng.uniform(math.log(least), math.log(most)))
