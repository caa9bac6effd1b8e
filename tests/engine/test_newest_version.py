# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33, which has no CPU build: its scheduler's side runs on the Python files of its wheel.

The tests of other files run there unchanged, with the router beside them, in their own process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.versions import NEWEST, run_under

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
TIMEOUT_S = 1_500.0
# Only the novelties of 0.33 are tested: hashes with lookahead under EAGLE, and the tier's events.
# KVROUTER_TEST_NEWEST_WHOLE=1 runs all of the files, which takes some ten minutes.
WHOLE = os.environ.get("KVROUTER_TEST_NEWEST_WHOLE") == "1"
FILES = {
    "test_hits.py": "hit_equals and eagle and not cpu and not simple",
    "test_offload_hits.py": "self-describing and window or eagle",
    "test_patch_catalog.py": "eagle",
}
MORE_FILES = ("test_simple_connector.py", "test_patch_reports.py", "test_patch_resets.py")


@pytest.mark.parametrize("name", [*FILES, *MORE_FILES] if WHOLE else FILES)
def test_the_same_claims_hold(name: str) -> None:
    selection = [] if WHOLE else ["-k", FILES[name]]
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / name), *selection]
    output = run_under(NEWEST, HERE / "run_pytest.py", *arguments, timeout_s=TIMEOUT_S, hash_seed=None)
    print(output)
    assert "passed" in output and " failed" not in output


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("newest")
    out = folder / "out.json"
    run_under(NEWEST, HERE / "newest_probe.py", str(model), str(folder), str(out), timeout_s=TIMEOUT_S)
    runs_by_name: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return runs_by_name


@pytest.mark.parametrize("name", ["async", "sync"])
def test_our_tiers_have_what_is_new(name: str, runs: dict[str, dict[str, Any]]) -> None:
    run = runs[name]
    assert run["features"] == [True, True]
    # A note whose chunk is not in memory would stay for ever.
    assert run["noted"] and not run["noted_and_gone"]
    assert run["promoted"] and run["resets"] and run["held_back"] and not run["holds_still"]
    assert bool(run["waited"]) is (name == "sync")
    (facts,) = run["facts"]
    assert sorted(facts) == sorted(run["labels"])
