# SPDX-License-Identifier: Apache-2.0
"""Another router's rule in virtual time: it gets the view that such a router has of each worker, and picks one.

Each rule gets its best case: KV events arrive as soon as this router's own, an engine's gauges are current, and every
first token and end is reported. A rule sees only the full-attention groups of a hybrid model, on the GPU, which is the
part of the events that Dynamo 1.6.1, vllm-router 0.1.17 and llm-d keep (measured with the same events).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvrouter.replay.fleet.virtual_fleet import MODEL, VirtualFleet
from kvrouter.replay.policies.routing import Arrival, EngineLoads, Placed
from kvrouter.router.index.matching.question import Question


@dataclass(slots=True)
class InFlight:
    """The requests that a router has sent to one worker and that have not ended."""

    requests: int = 0
    # Prompt tokens of requests that have no first token yet, less their hits when they were placed.
    prefill_tokens: int = 0


@dataclass(slots=True)
class Sight:
    """A prompt, and the state of every worker when it arrives. All lists are by worker."""

    now_s: float
    num_tokens: int
    pieces: NDArray[np.uint64]
    # Hashes of the prompt's full blocks of full attention, `block_tokens` tokens each.
    blocks: list[int]
    block_tokens: int
    # Cached tokens by full attention on the GPU alone.
    hits: Sequence[int]
    # Cached tokens by all groups and tiers, which no other router sees.
    exact_hits: Sequence[int]
    in_flight: Sequence[InFlight]
    # Returns the engines' gauges.
    engines: EngineLoads = field(repr=False)
    # See `Request.session`.
    session: int | None = None


class Rule:
    """The base of a rule, which picks a worker and may keep state of requests by `placed` and `done`."""

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker for a prompt."""
        raise NotImplementedError

    def placed(self, sight: Sight, worker: int) -> None:
        """Note that the prompt was placed at `worker`, which may differ from the rule's pick."""

    def done(self, blocks: list[int], worker: int) -> None:
        """Note that a request with these blocks has ended."""


class PeerRouter:
    """A router that follows a rule and counts the requests that it has sent."""

    def __init__(self, fleet: VirtualFleet, rule: Rule, seed: int) -> None:
        self.rule = rule
        self.in_flight = [InFlight() for _ in fleet.keys]
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._loads: EngineLoads = list
        self._numbers = {key: number for number, key in enumerate(fleet.keys)}
        self._block_tokens = fleet.block_tokens
        self._step = fleet.block_tokens // fleet.hash_block_size(MODEL)

    def place(self, arrival: Arrival, pinned: int | None = None) -> Placed:
        """Place a request at the worker that the rule picks, or at `pinned`."""
        self._fleet.catch_up()
        hits = self._fleet.hits(Question(MODEL, arrival.num_tokens, block_hashes=arrival.hashes))
        full_attention, exact = [0] * len(hits), [0] * len(hits)
        for hit in hits:
            number = self._numbers[hit.worker]
            full_attention[number], exact[number] = hit.full_attention, hit.tokens
        sight = Sight(
            self._fleet.now_s,
            arrival.num_tokens,
            arrival.pieces,
            arrival.hashes[self._step - 1 :: self._step].tolist(),
            self._block_tokens,
            full_attention,
            exact,
            self.in_flight,
            self._loads,
            arrival.session,
        )
        chosen = self.rule.pick(sight, self._rng) if pinned is None else pinned
        prefill_tokens = arrival.num_tokens - full_attention[chosen]
        in_flight, blocks = self.in_flight[chosen], sight.blocks
        in_flight.requests += 1
        in_flight.prefill_tokens += prefill_tokens
        self.rule.placed(sight, chosen)

        def first_token() -> None:
            nonlocal prefill_tokens
            in_flight.prefill_tokens -= prefill_tokens
            prefill_tokens = 0

        def done(output_tokens: int | None) -> None:
            first_token()
            in_flight.requests -= 1
            self.rule.done(blocks, chosen)

        return Placed(chosen, max(exact), exact[chosen], exact[chosen], _learn_nothing, first_token, done)

    def tend(self, loads: EngineLoads) -> None:
        """Keep the engines' gauges for the next pick."""
        self._loads = loads


def _learn_nothing(tokens: int) -> None:
    """Ignore the reused tokens, as these routers do not learn from them."""


def least(costs: Sequence[float], rng: random.Random) -> int:
    """Return the index of the least cost; among equals, any."""
    best = min(costs)
    return rng.choice([i for i, cost in enumerate(costs) if cost == best])
