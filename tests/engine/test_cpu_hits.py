# SPDX-License-Identifier: Apache-2.0
"""The router's `gpu` and `cpu` equal what vLLM's scheduler would reuse with its CPU tier, placeholders or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm")

from tests.engine.comparison import Comparison, Tally, verdict
from tests.engine.group_sets import OFFLOAD_SETS, OffloadSet
from tests.engine.oracle import Oracle
from tests.engine.workload import PromptTree
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

ROUNDS = 110
QUESTIONS = 6
# A learned catalog needs a few batches.
MIN_PROBES = ROUNDS * QUESTIONS * 3 // 4
MIN_EXTERNAL_SHARE = 0.08
MIN_CPU_EVICTED = 30


@pytest.mark.parametrize("offload_set", OFFLOAD_SETS, ids=lambda offload_set: offload_set.name)
def test_cpu_hit_equals_the_engines(
    offload_set: OffloadSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    rng = Random(f"{seed} {offload_set.name}")
    oracle = Oracle(offload_set.group_set, model, rng, offload_set.connector_config())
    try:
        comparison = Comparison(router, oracle, rng, seed, offload_set.name)
        tally = comparison.run(offload_set.catalog(), ROUNDS, QUESTIONS)
    finally:
        oracle.close()
    table("GPU and CPU hits, router against vLLM's scheduler with an OffloadingConnector", Tally.HEADINGS, tally.row())
    verdict(tally)
    assert tally.probes >= MIN_PROBES
    assert tally.external_hits >= MIN_EXTERNAL_SHARE * tally.probes
    assert tally.cpu_evicted >= MIN_CPU_EVICTED


UNDECLARED = [offload_set for offload_set in OFFLOAD_SETS if offload_set.blocks_per_chunk > 1]


@pytest.mark.parametrize("offload_set", UNDECLARED, ids=lambda offload_set: offload_set.name)
def test_an_undeclared_chunk_size_never_claims_more_than_the_engine_gives(
    offload_set: OffloadSet, router: RouterProcess, model: Path, seed: int
) -> None:
    rng = Random(f"{seed} {offload_set.name}")
    oracle = Oracle(offload_set.group_set, model, rng, offload_set.connector_config())
    try:
        comparison = Comparison(router, oracle, rng, seed, f"undeclared {offload_set.name}")
        tally = comparison.run(None, ROUNDS, QUESTIONS, never_whole=True)
    finally:
        oracle.close()
    verdict(tally)
    assert tally.early == ROUNDS * QUESTIONS and tally.gpu_hits


@pytest.mark.parametrize("offload_set", OFFLOAD_SETS, ids=lambda offload_set: offload_set.name)
def test_asking_the_engine_changes_nothing(offload_set: OffloadSet, model: Path, seed: int) -> None:
    """The oracle's questions to the connector are free of side effects."""
    rng = Random(seed)
    oracle = Oracle(offload_set.group_set, model, rng, offload_set.connector_config())
    tree = PromptTree(rng, 512)
    try:
        for _ in range(60):
            oracle.submit(tree.request())
            oracle.step(tree)
            before = oracle.snapshot()
            for _ in range(5):
                oracle.ask(tree.question())
            assert oracle.snapshot() == before
    finally:
        oracle.close()
