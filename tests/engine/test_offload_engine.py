# SPDX-License-Identifier: Apache-2.0
"""A real engine with our CPU and disk tiers: the predicted hit of each tier is reused, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import (
    FEWER_PROMPTS,
    HEADINGS,
    MODEL,
    PROMPTS,
    SHAPES,
    WORKER,
    Case,
    Run,
    offload,
    settled,
    workload,
)
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine

CASES = {
    "5 windows+full, lru, 1 block a chunk": Case("windows", PROMPTS, {"eviction_policy": "lru"}),
    "5 windows+full, arc, 1 block a chunk": Case("windows", FEWER_PROMPTS, {"eviction_policy": "arc"}),
    "5 windows+full, lru, 4 blocks a chunk": Case("windows", FEWER_PROMPTS, {"blocks_per_chunk": 4}),
    "5 windows+full, arc, 4 blocks a chunk": Case(
        "windows", FEWER_PROMPTS, {"eviction_policy": "arc", "blocks_per_chunk": 4}
    ),
    "3 states+full, lru, 1 block a chunk": Case("states", PROMPTS),
    "3 states+full, arc, 1 block a chunk": Case("states", FEWER_PROMPTS, {"eviction_policy": "arc"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_tier_is_predicted(
    name: str,
    router: RouterProcess,
    models: Callable[[str], Path],
    plain: Callable[[str], list[Any]],
    tmp_path: Path,
    seed: int,
    table: Callable[..., None],
) -> None:
    case = CASES[name]
    shape = SHAPES[case.shape]
    truth = plain(case.shape)
    model = models(shape.model)
    with OffloadEngine(tmp_path / "engine", model, shape.gpu_blocks, offload(case, tmp_path / "disk")) as engine:
        run = Run(router, engine)
        router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
        try:
            for number, work in enumerate(workload(case.shape, seed)):
                if number < case.count:
                    run.ask(number, work, truth[number])
            row = settled(router, engine)
            ledger, resident = engine.do("ledger"), engine.do("resident")
            same, counts = engine.do("same_bytes"), engine.do("counts")
        finally:
            router.unregister(WORKER)
    assert not list((tmp_path / "slots").iterdir()), "memory that outlives its engine"
    table("Real engine with CPU and disk tiers", HEADINGS, run.row(name, same["compared"]))
    assert not run.wrong, "\n".join(run.wrong[:8])
    assert not run.other, "\n".join(run.other[:8])
    assert ledger == resident
    assert row["patch"]["mismatches"] == 0
    assert same["compared"] > 10 and same["different"] == 0
    assert min(run.hits.values()) > 3 and min(run.beyond.values()) > 3
    assert counts["vllm:kvrouter_offload_promotions"] > 20
    assert counts["vllm:kvrouter_offload_promotions_refused"] == 0
