# SPDX-License-Identifier: Apache-2.0
"""Our CPU tier under vLLM's scheduler, for every layout: the router's answer equals the engine's.

This holds with the patch and without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.comparison import Comparison, Tally, verdict
from tests.engine.group_sets import OFFLOAD_SETS, OffloadSet
from tests.engine.offload_engine import SPEC
from tests.engine.oracle import Oracle
from tests.engine.patched import last_reported, patched, tap_of
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

ROUNDS = 50
QUESTIONS = 6
MIN_PROBES = ROUNDS * QUESTIONS * 3 // 4
POLICIES = ("lru", "arc")


@pytest.mark.parametrize("offload_set", OFFLOAD_SETS, ids=lambda offload_set: offload_set.name)
def test_our_tiers_hits_are_predicted(
    offload_set: OffloadSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    """Compare with the patch and without it, alternating between the eviction policies.

    Without it, consumers of the stock topic get the events that vLLM's own tier would send, and are as exact.
    """
    for patch in (True, False):
        name = f"{'patched' if patch else 'stock'} {offload_set.name}"
        rng = Random(f"{seed} ours {name}")
        policy = POLICIES[(OFFLOAD_SETS.index(offload_set) + patch) % len(POLICIES)]
        offload = SPEC | offload_set.connector_config() | {"eviction_policy": policy}
        tally = run(offload_set, offload, patch, router, model, rng, seed, name)
        table("Our CPU tier under vLLM's scheduler", Tally.HEADINGS, tally.row())
        verdict(tally)
        assert tally.probes >= MIN_PROBES
        assert tally.external_hits and tally.cpu_evicted


def run(
    offload_set: OffloadSet,
    offload: dict[str, Any],
    patch: bool,
    router: RouterProcess,
    model: Path,
    rng: Random,
    seed: int,
    name: str,
) -> Tally:
    if not patch:
        oracle = Oracle(offload_set.group_set, model, rng, offload)
        try:
            return Comparison(router, oracle, rng, seed, name).run(offload_set.catalog(), ROUNDS, QUESTIONS)
        finally:
            oracle.close()
    with patched():
        oracle = Oracle(offload_set.group_set, model, rng, offload)
        try:
            reporter: Any = tap_of(oracle).reporter
            comparison = Comparison(router, oracle, rng, seed, name)
            return comparison.run(
                None, ROUNDS, QUESTIONS, patch=reporter.requests_endpoint, reported=lambda: last_reported(oracle)
            )
        finally:
            oracle.close()
