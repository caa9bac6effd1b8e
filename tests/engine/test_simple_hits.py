# SPDX-License-Identifier: Apache-2.0
"""The router's `gpu` and `cpu` equal what vLLM's scheduler would reuse with a SimpleCPUOffloadConnector."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm")

from comparison import Comparison, Tally, verdict
from group_sets import SIMPLE_SETS, SimpleSet
from oracle import Oracle
from router_process import RouterProcess
from workload import PromptTree

pytestmark = pytest.mark.engine

# 95 rounds of 6 questions in 38 layouts: more than 20,000 probes with those before a learned catalog is whole left out.
ROUNDS = int(os.environ.get("KVROUTER_SIMPLE_ROUNDS", "95"))
QUESTIONS = 6
MIN_PROBES = ROUNDS * QUESTIONS * 3 // 4
MIN_EXTERNAL_SHARE = 0.05
MIN_CPU_EVICTED = 30


def make_oracle(simple_set: SimpleSet, model: Path, rng: Random) -> Oracle:
    return Oracle(simple_set.group_set, model, rng, simple_set.connector_config(), simple_set.CONNECTOR)


@pytest.mark.parametrize("simple_set", SIMPLE_SETS, ids=lambda simple_set: simple_set.name)
def test_cpu_hit_equals_the_engines(
    simple_set: SimpleSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    rng = Random(f"{seed} {simple_set.name}")
    oracle = make_oracle(simple_set, model, rng)
    try:
        tally = Comparison(router, oracle, rng, seed, simple_set.name).run(simple_set.catalog(), ROUNDS, QUESTIONS)
    finally:
        oracle.close()
    table("GPU and CPU hits, router against vLLM's SimpleCPUOffloadConnector", Tally.HEADINGS, tally.row())
    verdict(tally)
    assert tally.probes >= MIN_PROBES
    assert tally.external_hits >= MIN_EXTERNAL_SHARE * tally.probes
    assert tally.cpu_evicted >= MIN_CPU_EVICTED


@pytest.mark.parametrize("simple_set", SIMPLE_SETS[::5], ids=lambda simple_set: simple_set.name)
def test_asking_the_engine_changes_nothing(simple_set: SimpleSet, model: Path, seed: int) -> None:
    rng = Random(seed)
    oracle = make_oracle(simple_set, model, rng)
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
