# SPDX-License-Identifier: Apache-2.0
"""The router's hits equal the reuse of vLLM's scheduler, for every layout and CPU tier, under constant eviction."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm")

from tests.engine.comparison import Comparison, Tally, verdict
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, SIMPLE_SETS, GroupSet, OffloadSet, SimpleSet
from tests.engine.oracle import running
from tests.engine.workload import PromptTree
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

QUESTIONS = 6
# 95 rounds of 6 questions in 38 layouts: more than 20,000 probes, without those before a learned catalog is complete.
SIMPLE_ROUNDS = int(os.environ.get("KVROUTER_TEST_SIMPLE_ROUNDS", "95"))

Layout = GroupSet | OffloadSet | SimpleSet


@dataclass(frozen=True)
class Bounds:
    """The length of the comparison for layouts of one kind, and the limits below which it would prove little."""

    table: str
    rounds: int
    # A learned catalog is complete after some batches; this share of the questions must come later and count.
    min_probe_share: float
    # Answers must not be mostly zero, and something must have been evicted.
    min_hit_share: float
    min_evicted: int


BOUNDS: dict[type[Layout], Bounds] = {
    GroupSet: Bounds("GPU hits, router against vLLM's scheduler", 160, 0.9, 0.08, 100),
    OffloadSet: Bounds("GPU and CPU hits, against vLLM's scheduler with an OffloadingConnector", 110, 0.75, 0.08, 30),
    SimpleSet: Bounds("GPU and CPU hits, against vLLM's SimpleCPUOffloadConnector", SIMPLE_ROUNDS, 0.75, 0.05, SIMPLE_ROUNDS // 4),
}  # fmt: skip
LAYOUTS = (*GPU_SETS, *OFFLOAD_SETS, *SIMPLE_SETS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@every_layout
def test_the_hit_equals_the_engines(
    layout: Layout, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    bounds = BOUNDS[type(layout)]
    rng = Random(f"{seed} {layout.name}")
    is_declared = not isinstance(layout, GroupSet) or layout.declared
    with running(layout, model, rng) as oracle:
        comparison = Comparison(router, oracle, rng, seed, layout.name)
        tally = comparison.run(layout.catalog() if is_declared else None, bounds.rounds, QUESTIONS)
    table(bounds.table, Tally.HEADINGS, tally.row())
    verdict(tally)
    on_gpu = isinstance(layout, GroupSet)
    assert tally.probes >= bounds.min_probe_share * bounds.rounds * QUESTIONS
    assert (tally.gpu_hits if on_gpu else tally.external_hits) >= bounds.min_hit_share * tally.probes
    assert (tally.evicted if on_gpu else tally.cpu_evicted) >= bounds.min_evicted


UNDECLARED = [offload_set for offload_set in OFFLOAD_SETS if offload_set.blocks_per_chunk > 1]


@pytest.mark.parametrize("offload_set", UNDECLARED, ids=lambda offload_set: offload_set.name)
def test_an_undeclared_chunk_size_never_claims_more_than_the_engine_gives(
    offload_set: OffloadSet, router: RouterProcess, model: Path, seed: int
) -> None:
    rounds = BOUNDS[OffloadSet].rounds
    rng = Random(f"{seed} {offload_set.name}")
    with running(offload_set, model, rng) as oracle:
        comparison = Comparison(router, oracle, rng, seed, f"undeclared {offload_set.name}")
        tally = comparison.run(None, rounds, QUESTIONS, never_whole=True)
    verdict(tally)
    assert tally.early == rounds * QUESTIONS and tally.gpu_hits


# Every kind of layout, in a fraction of the time.
SOME_GPU_SETS = [
    group_set for group_set in GPU_SETS if group_set.name in ("full+window", "3-way", "full 16+mamba 64, partial hits")
]
SOME_LAYOUTS = (*SOME_GPU_SETS, *OFFLOAD_SETS, *SIMPLE_SETS[::5])


@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=lambda layout: layout.name)
def test_asking_the_engine_changes_nothing(layout: Layout, model: Path, seed: int) -> None:
    """Compare snapshots around questions, because the oracle must not disturb the engine with its own questions."""
    rng = Random(seed)
    tree = PromptTree(rng, 512)
    with running(layout, model, rng) as oracle:
        for _ in range(60):
            oracle.submit(tree.request())
            oracle.step(tree)
            before = oracle.snapshot()
            for _ in range(5):
                oracle.ask(tree.question())
            assert oracle.snapshot() == before
