# SPDX-License-Identifier: Apache-2.0
"""vLLM's own p2p tier reads the source that the router names, from requests of every path that has one.

The tier itself needs a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.serve.proxy.kv_source import PATHS
from tests.engine.versions import INSTALLED, NEWEST, run_under

pytestmark = pytest.mark.engine

TIMEOUT_S = 300.0
SOURCE = PlannedPull(WorkerKey("m", "w1"), "10.0.0.9", 5711, 64, 32, 0.25).source_params("a-selection")
# `/inference/v1/generate` passes its field on in the handler of its server.
READ_BY_A_HANDLER = "/inference/v1/generate"


@pytest.mark.parametrize("version", ["0.28.0", "0.31.0", INSTALLED, NEWEST])
def test_vllm_reads_the_source_that_the_router_names(version: str) -> None:
    script = Path(__file__).parent / "version_source.py"
    output = run_under(version, script, json.dumps(SOURCE), timeout_s=TIMEOUT_S)
    read = json.loads(output.splitlines()[-1])
    assert read.pop("parsed") == ["a-selection", "10.0.0.9:5711", True]
    if version == NEWEST:
        # Its server imports packages that the engine's environment does not have.
        return
    assert read.keys() == PATHS - {READ_BY_A_HANDLER}
    assert all(params == {"mine": 1, "remote_kv_source": SOURCE} for params in read.values())
