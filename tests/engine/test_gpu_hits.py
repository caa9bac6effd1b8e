# SPDX-License-Identifier: Apache-2.0
"""The router's `gpu` equals what vLLM's scheduler would reuse, for every group layout, under constant eviction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm")

from tests.engine.comparison import Comparison, Tally, verdict
from tests.engine.group_sets import GPU_SETS, GroupSet
from tests.engine.oracle import Oracle
from tests.engine.workload import PromptTree
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

ROUNDS = 160
QUESTIONS = 6
# A learned catalog is whole after the first few batches; that many questions must be left to count.
MIN_PROBES = ROUNDS * QUESTIONS * 9 // 10
# Below these the run would prove little: answers that are mostly zero, or nothing ever evicted.
MIN_HIT_SHARE = 0.08
MIN_EVICTED = 100


@pytest.mark.parametrize("group_set", GPU_SETS, ids=lambda group_set: group_set.name)
def test_gpu_hit_equals_the_engines(
    group_set: GroupSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    rng = Random(f"{seed} {group_set.name}")
    oracle = Oracle(group_set, model, rng)
    try:
        comparison = Comparison(router, oracle, rng, seed, group_set.name)
        tally = comparison.run(group_set.catalog() if group_set.declared else None, ROUNDS, QUESTIONS)
    finally:
        oracle.close()
    table("GPU hits, router against vLLM's scheduler", Tally.HEADINGS, tally.row())
    verdict(tally)
    assert tally.probes >= MIN_PROBES
    assert tally.gpu_hits >= MIN_HIT_SHARE * tally.probes
    assert tally.evicted >= MIN_EVICTED


@pytest.mark.parametrize("name", ["full+window", "3-way", "full 16+mamba 64, partial hits"])
def test_asking_the_engine_changes_nothing(name: str, model: Path, seed: int) -> None:
    """The oracle's questions are free of side effects; otherwise it would compare with an engine that it disturbed."""
    rng = Random(seed)
    group_set = next(group_set for group_set in GPU_SETS if group_set.name == name)
    oracle = Oracle(group_set, model, rng)
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
