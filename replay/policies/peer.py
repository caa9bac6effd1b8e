# SPDX-License-Identifier: Apache-2.0
"""Another router's rule in virtual time: it sees what such a router sees of each worker, and names one.

What it sees is the best case of each: KV events arrive as soon as this router's own, an engine's gauges are those of
this moment, and every first token and end is heard. Of a hybrid model's groups it sees full attention on the GPU, which
is what Dynamo 1.6.1, vllm-router 0.1.17 and llm-d keep of the events (measured with the same events)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrouter.replay.fleet.virtual_fleet import MODEL, VirtualFleet
from kvrouter.replay.policies.routing import Arrival, EngineLoads
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.engines.engine_metrics import EngineLoad


@dataclass(slots=True)
class InFlight:
    """What a router itself has sent to one worker, and not seen the end of. prefill_tokens: those of prompts without
    their first token that were not cached there, by what it saw."""

    requests: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class Sight:
    """A prompt, and every worker at the moment when it comes; the lists go together. hits: its cached tokens by full
    attention on the GPU alone; exact_hits: by all groups and tiers, which no peer sees. blocks: hashes of its full
    blocks of full attention, `block_tokens` each. session: see Request."""

    now_s: float
    num_tokens: int
    pieces: NDArray[np.uint64]
    blocks: list[int]
    block_tokens: int
    hits: Sequence[int]
    exact_hits: Sequence[int]
    in_flight: Sequence[InFlight]
    loads: EngineLoads = field(repr=False)
    session: int | None = None

    def engines(self) -> Sequence[EngineLoad]:
        return self.loads()


class Rule(Protocol):
    """Picks a worker. `placed` and `done` let it keep what it wants to remember of a request."""

    def pick(self, sight: Sight, rng: random.Random) -> int: ...

    def placed(self, sight: Sight, worker: int) -> None: ...

    def done(self, blocks: list[int], worker: int) -> None: ...


class StatelessRule:
    """What a rule does that remembers nothing."""

    def placed(self, sight: Sight, worker: int) -> None:
        pass

    def done(self, blocks: list[int], worker: int) -> None:
        pass


class PeerPlaced:
    """A request where a rule has put it."""

    __slots__ = ("_blocks", "_prefill_tokens", "_router", "achievable_tokens", "number", "predicted_tokens")

    def __init__(
        self, router: PeerRouter, number: int, blocks: list[int], prefill_tokens: int, achievable: int, predicted: int
    ) -> None:
        self._router = router
        self._blocks = blocks
        self._prefill_tokens = prefill_tokens
        self.number = number
        self.achievable_tokens = achievable
        self.predicted_tokens = predicted

    def first_token(self) -> None:
        self._router.in_flight[self.number].prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    @property
    def expected_tokens(self) -> int:
        return self.predicted_tokens

    def reused(self, tokens: int) -> None:
        pass

    def done(self, output_tokens: int | None) -> None:
        self.first_token()
        self._router.in_flight[self.number].requests -= 1
        self._router.rule.done(self._blocks, self.number)


class PeerRouter:
    """A rule, and the count of what it has sent where."""

    def __init__(self, fleet: VirtualFleet, rule: Rule, seed: int) -> None:
        self.rule = rule
        self.in_flight = [InFlight() for _ in fleet.keys]
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._loads: EngineLoads = list
        self._numbers = {key: number for number, key in enumerate(fleet.keys)}
        self._block_tokens = fleet.block_tokens
        self._step = fleet.block_tokens // fleet.hash_block_size(MODEL)

    def place(self, arrival: Arrival, pinned: int | None = None) -> PeerPlaced:
        self._fleet.catch_up()
        hits = self._fleet.hits(Question(MODEL, arrival.num_tokens, block_hashes=arrival.hashes))
        seen, exact = [0] * len(hits), [0] * len(hits)
        for hit in hits:
            number = self._numbers[hit.worker]
            seen[number], exact[number] = hit.full_attention, hit.disk
        sight = Sight(
            self._fleet.now_s,
            arrival.num_tokens,
            arrival.pieces,
            arrival.hashes[self._step - 1 :: self._step].tolist(),
            self._block_tokens,
            seen,
            exact,
            self.in_flight,
            self._loads,
            arrival.session,
        )
        chosen = self.rule.pick(sight, self._rng) if pinned is None else pinned
        prefill_tokens = arrival.num_tokens - seen[chosen]
        self.in_flight[chosen].requests += 1
        self.in_flight[chosen].prefill_tokens += prefill_tokens
        self.rule.placed(sight, chosen)
        return PeerPlaced(self, chosen, sight.blocks, prefill_tokens, max(exact), exact[chosen])

    def tend(self, loads: EngineLoads) -> None:
        self._loads = loads


def least(costs: Sequence[float], rng: random.Random) -> int:
    """The place of the least cost; among equals, any."""
    best = min(costs)
    return rng.choice([i for i, cost in enumerate(costs) if cost == best])
