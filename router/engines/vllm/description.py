# SPDX-License-Identifier: Apache-2.0
"""vLLM: what the wire, the schemes and the rule of this router were first made for."""

from __future__ import annotations

from kvrouter.router.engines.engine import Engine
from kvrouter.router.kvcache.block_hash import HashScheme, known_schemes
from kvrouter.router.kvcache.page_hash import LOOKAHEAD_TOKENS
from kvrouter.router.workers.engine_answers import SOURCES_PATH, streams_in
from kvrouter.router.workers.registration import CatalogSpec


def schemes(spec: CatalogSpec, seed: str | None) -> tuple[HashScheme, ...]:
    """Only what was stated, where something was. seed: the engines' PYTHONHASHSEED as configured. Raises ValueError on
    an unknown algorithm with a none_hash, and on a none_hash of a wrong length."""
    # SGLang's names count for nothing; one that is of no known engine raises.
    algo = None if spec.hash_algo in LOOKAHEAD_TOKENS else spec.hash_algo
    if spec.none_hash is not None:
        return (HashScheme.from_bytes(algo or "sha256", bytes.fromhex(spec.none_hash)),)
    stated_seed = spec.none_hash_seed if spec.none_hash_seed is not None else seed
    known = known_schemes(() if stated_seed is None else (stated_seed,))
    if stated_seed is not None:
        # What the user says comes first; an engine with vLLM's default seed is still recognised.
        known = tuple(dict.fromkeys((HashScheme.from_seed(algo or "sha256", stated_seed), *known)))
    return tuple(scheme for scheme in known if algo is None or scheme.algo == algo) or known


def completed(spec: CatalogSpec) -> CatalogSpec:
    return spec


def stock_problem(spec: CatalogSpec) -> str:
    """None: every group's stores and removals are published."""
    return ""


VLLM = Engine(
    name="vllm",
    title="vLLM",
    schemes=schemes,
    completed=completed,
    stock_problem=stock_problem,
    media={},
    tiers_shown=True,
    info_path=SOURCES_PATH,
    streams_in=streams_in,
)
