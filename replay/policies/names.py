# SPDX-License-Identifier: Apache-2.0
"""Every policy by its name, and the policies that are compared by default."""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.replay.fleet.virtual_fleet import VirtualFleet
from kvrouter.replay.policies import this_router
from kvrouter.replay.policies.cache_aware import CacheAware
from kvrouter.replay.policies.dynamo import Dynamo
from kvrouter.replay.policies.llm_d import LlmD
from kvrouter.replay.policies.lmetric import LMetric
from kvrouter.replay.policies.peer import PeerRouter, Rule
from kvrouter.replay.policies.routing import Router
from kvrouter.replay.policies.session_hash import SessionHash
from kvrouter.replay.policies.this_router import ThisRouter
from kvrouter.replay.policies.vllm_router import VllmRouter
from kvrouter.router.route.placement.policies import KV

# From the number of workers and the tokens of a piece to the rule.
RULES: dict[str, Callable[[int, int], Rule]] = {
    "session_hash": lambda workers, piece_tokens: SessionHash(workers),
    "cache_aware": CacheAware,
    "dynamo": lambda workers, piece_tokens: Dynamo(workers),
    "llm_d": lambda workers, piece_tokens: LlmD(),
    "vllm_router": lambda workers, piece_tokens: VllmRouter(workers),
    "lmetric": lambda workers, piece_tokens: LMetric(),
    "lmetric_exact": lambda workers, piece_tokens: LMetric(exact=True),
}
OWN = KV
BASELINE = "round_robin"
COMPARED = (
    BASELINE,
    "least_load",
    "full_attention_only",
    "session_hash",
    "cache_aware",
    "dynamo",
    "llm_d",
    "vllm_router",
    "lmetric",
    OWN,
)
NAMES = (*this_router.NAMES, *RULES)


def router_of(name: str, fleet: VirtualFleet, seed: int, piece_tokens: int) -> Router:
    """Create the router of a policy. `seed` is for its random choices."""
    if name in RULES:
        return PeerRouter(fleet, RULES[name](len(fleet.keys), piece_tokens), seed)
    return ThisRouter(fleet, name, seed)
