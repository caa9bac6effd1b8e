# SPDX-License-Identifier: Apache-2.0
"""The router's `gpu` and `cpu` equal what vLLM's scheduler would reuse with a SimpleCPUOffloadConnector."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvrouter.router.index.ingest.declared_catalog import declared_spec
from kvrouter.router.model.workers.registration import CatalogSpec
from tests.engine.comparison import Comparison, Tally, verdict
from tests.engine.group_sets import SIMPLE_SETS, SimpleSet
from tests.engine.oracle import Oracle
from tests.engine.patched import last_reported, patched, reporter_of, tap_of
from tests.engine.workload import PromptTree
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

# 95 rounds of 6 questions in 38 layouts: more than 20,000 probes with those before a learned catalog is whole left out.
ROUNDS = int(os.environ.get("KVROUTER_TEST_SIMPLE_ROUNDS", "95"))
QUESTIONS = 6
MIN_PROBES = ROUNDS * QUESTIONS * 3 // 4
RESET_ROUNDS = 40
MIN_EXTERNAL_SHARE = 0.05
MIN_CPU_EVICTED = ROUNDS // 4


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


# Every kind of layout, eager and lazy, in a part of the time.
SOME_SETS = SIMPLE_SETS[::4]


@pytest.mark.parametrize("simple_set", SOME_SETS, ids=lambda simple_set: simple_set.name)
def test_resets_are_followed_with_the_engine_patch(
    simple_set: SimpleSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    name = f"patched {simple_set.name}"
    rng = Random(f"{seed} {name}")
    with patched() as records:
        oracle = make_oracle(simple_set, model, rng)
        try:
            reporter: Any = tap_of(oracle).reporter
            tally = Comparison(router, oracle, rng, seed, name).run(
                None,
                RESET_ROUNDS,
                QUESTIONS,
                patch=reporter.requests_endpoint,
                reported=lambda: last_reported(oracle),
                resets=True,
            )
        finally:
            oracle.close()
    table("The same with the engine patch and resets", Tally.HEADINGS, tally.row())
    verdict(tally)
    assert records.texts == []
    assert tally.early == 0 and tally.external_hits and tally.clears and tally.cpu_evicted


@pytest.mark.parametrize("simple_set", SOME_SETS, ids=lambda simple_set: simple_set.name)
def test_a_reset_that_does_not_say_what_it_empties_never_leaves_too_much(
    simple_set: SimpleSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    name = f"resets {simple_set.name}"
    rng = Random(f"{seed} {name}")
    oracle = make_oracle(simple_set, model, rng)
    try:
        comparison = Comparison(router, oracle, rng, seed, name)
        tally = comparison.run(simple_set.catalog(), RESET_ROUNDS, QUESTIONS, resets=True)
    finally:
        oracle.close()
    table("The same with resets, from vLLM's own events: only too much is a mismatch", Tally.HEADINGS, tally.row())
    verdict(tally)
    assert tally.early == RESET_ROUNDS * QUESTIONS and tally.gpu_hits and tally.clears


def test_the_patch_declares_the_connector_and_how_far_its_hits_may_reach(model: Path, seed: int) -> None:
    found = {}
    for simple_set in SIMPLE_SETS:
        with patched():
            oracle = make_oracle(simple_set, model, Random(seed))
            try:
                catalog = reporter_of(oracle)._declared
            finally:
                oracle.close()
        assert catalog is not None
        assert (catalog.connector, catalog.connectors) == (simple_set.CONNECTOR, [simple_set.CONNECTOR])
        found[simple_set.lazy, catalog.partial_hits] = catalog.offload_partial_hits
    assert found == {(False, False): False, (False, True): True, (True, False): False, (True, True): False}


def make_multi(model: Path, rng: Random) -> Oracle:
    """Both connectors inside a MultiConnector: the first takes its offer, however little, and both are on the CPU."""
    inner = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 100 * 4096}}
        for name in ("OffloadingConnector", "SimpleCPUOffloadConnector")
    ]
    return Oracle(SIMPLE_SETS[0].group_set, model, rng, {"connectors": inner}, "MultiConnector")


def test_the_connectors_inside_a_multi_connector_are_declared(model: Path, seed: int) -> None:
    with patched():
        oracle = make_multi(model, Random(seed))
        try:
            catalog = reporter_of(oracle)._declared
        finally:
            oracle.close()
    assert catalog is not None
    assert catalog.connectors == ["MultiConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"]
    assert (
        declared_spec(catalog, CatalogSpec()).offload_connector == "OffloadingConnector with SimpleCPUOffloadConnector"
    )


def test_two_tiers_of_a_multi_connector_earn_nothing_beside_the_gpu(
    router: RouterProcess, model: Path, seed: int
) -> None:
    rng = Random(f"{seed} multi")
    oracle = make_multi(model, rng)
    tree = PromptTree(rng, 512)
    router.register("multi", "multi", oracle.endpoint, oracle.replay_endpoint, None, None)
    try:
        router.wait_connected("multi")
        on_gpu = 0
        for _ in range(60):
            oracle.submit(tree.request())
            oracle.step(tree)
            oracle.step(tree)
            row = router.wait_seen("multi", oracle.last_seq)
            for _ in range(4):
                prompt = tree.question()
                _, gpu, _ = oracle.scheduler.kv_cache_manager.get_computed_blocks(oracle._request(prompt, 1))
                found = router.query("multi", "multi", prompt.token_ids, prompt.cache_salt)
                # Before the second of them has sent anything, it is one connector to the router.
                if "earns no credit" in row["reason"]:
                    assert found["gpu"] == found["cpu"] == found["disk"] == gpu
                    on_gpu += gpu > 0
        assert on_gpu and row["residency"]["g0:CPU"]
        assert "those of OffloadingConnector and of SimpleCPUOffloadConnector" in row["reason"]
    finally:
        router.unregister("multi")
        oracle.close()


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
