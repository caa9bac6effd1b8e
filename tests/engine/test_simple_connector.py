# SPDX-License-Identifier: Apache-2.0
"""vLLM's SimpleCPUOffloadConnector: resets, the patch's declaration of it, and two connectors in one.

`test_hits.py` compares the hits of every layout.
"""

from __future__ import annotations

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
from tests.engine.oracle import Oracle, running
from tests.engine.patched import last_reported, patched, reporter_of, tap_of
from tests.engine.workload import PromptTree
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

QUESTIONS = 6
RESET_ROUNDS = 40


# Every kind of layout, eager and lazy, in a fraction of the time.
SOME_SETS = SIMPLE_SETS[::4]


@pytest.mark.parametrize("simple_set", SOME_SETS, ids=lambda simple_set: simple_set.name)
def test_resets_are_followed_with_the_engine_patch(
    simple_set: SimpleSet, router: RouterProcess, model: Path, seed: int, table: Callable[..., None]
) -> None:
    name = f"patched {simple_set.name}"
    rng = Random(f"{seed} {name}")
    with patched() as records, running(simple_set, model, rng) as oracle:
        reporter: Any = tap_of(oracle).reporter
        tally = Comparison(router, oracle, rng, seed, name).run(
            None,
            RESET_ROUNDS,
            QUESTIONS,
            patch=reporter.requests_endpoint,
            reported=lambda: last_reported(oracle),
            resets=True,
        )
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
    with running(simple_set, model, rng) as oracle:
        comparison = Comparison(router, oracle, rng, seed, name)
        tally = comparison.run(simple_set.catalog(), RESET_ROUNDS, QUESTIONS, resets=True)
    table("The same with resets, from vLLM's own events: only too much is a mismatch", Tally.HEADINGS, tally.row())
    verdict(tally)
    assert tally.early == RESET_ROUNDS * QUESTIONS and tally.gpu_hits and tally.clears


def test_the_patch_declares_the_connector_and_how_far_its_hits_may_reach(model: Path, seed: int) -> None:
    partial_hits = {}
    for simple_set in SIMPLE_SETS:
        with patched(), running(simple_set, model, Random(seed)) as oracle:
            catalog = reporter_of(oracle)._declared
        assert catalog is not None
        assert (catalog.connector, catalog.connectors) == (simple_set.CONNECTOR, [simple_set.CONNECTOR])
        partial_hits[simple_set.lazy, catalog.partial_hits] = catalog.offload_partial_hits
    assert partial_hits == {(False, False): False, (False, True): True, (True, False): False, (True, True): False}


def make_multi(model: Path, rng: Random) -> Oracle:
    """Return an oracle with both connectors inside a MultiConnector.

    The offer of the first connector is taken, however little it is, and both tiers are on the CPU.
    """
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
                hits = router.query("multi", "multi", prompt.token_ids, prompt.cache_salt)
                # Before the second connector has sent an event, the router sees only one connector.
                if "earns no credit" in row["reason"]:
                    assert hits["gpu"] == hits["cpu"] == hits["disk"] == gpu
                    on_gpu += gpu > 0
        assert on_gpu and row["residency"]["g0:CPU"]
        assert "those of OffloadingConnector and of SimpleCPUOffloadConnector" in row["reason"]
    finally:
        router.unregister("multi")
        oracle.close()
