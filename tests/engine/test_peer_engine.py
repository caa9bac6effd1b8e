# SPDX-License-Identifier: Apache-2.0
"""Real engines that fetch chunks from each other by NIXL: answers are those of an engine without any cache.

`make peer-proof` runs more prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.engine_patch.offload.spec import HybridOffloadingSpec
from tests.engine.offload_workload import SHAPES
from tests.engine.peer_proof import Proof

pytestmark = pytest.mark.engine

# Fewer evict nothing from some CPU tier. `make peer-proof` runs more.
PROMPTS = 60


@pytest.mark.parametrize("shape", SHAPES)
def test_three_engines_that_fetch_from_each_other_answer_as_one_without_a_cache(
    shape: str, models: Callable[[str], Path], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As between two machines.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    summary = Proof(shape, models(SHAPES[shape].model), tmp_path, seed, PROMPTS).run()
    assert summary.faults == 0 and summary.predicted, summary
    assert summary.prompts_with_fetched_chunks > PROMPTS // 10, summary
    assert all(count > 0 for count in summary.evicted_chunks), summary
    assert summary.compared_pages > 15, summary


def test_an_engine_that_ends_lends_nothing_more_before_it_releases_its_memory() -> None:
    ended: list[str] = []

    def part(name: str) -> Callable[[], None]:
        return lambda: ended.append(name)

    # A whole spec needs a whole engine.
    spec: Any = object.__new__(HybridOffloadingSpec)
    spec._peering = SimpleNamespace(stop_lending=part("lending"))
    spec._shared_region = SimpleNamespace(close=part("memory"))
    spec._close(SimpleNamespace(close=part("tiers")))
    assert ended == ["lending", "tiers", "memory"]
