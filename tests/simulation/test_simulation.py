# SPDX-License-Identifier: Apache-2.0
"""Worlds of the simulation keep the laws, a seed decides all of a world, and the search finds what is broken."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.simulation.mutants import find
from tests.simulation.mutations import MUTATIONS, ROOT
from tests.simulation.search import Totals, run_alone, search

# Worlds that broke a law once (docs/explanation/fault-tests.md has the laws), and one that did not.
SEEDS = (3, 12, 131, 1034, 1047)
# The worlds of the slow test, and the worlds in which each fault of the product must be found.
MORE_SEEDS = range(100, 112)
MOST_WORLDS = 12


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fleet_with_faults_keeps_the_laws(seed: int) -> None:
    outcome = run_alone(seed)
    assert not outcome.problem, "\n".join(outcome.history[-60:])
    assert outcome.faults and outcome.judgements


def test_a_seed_decides_the_whole_history() -> None:
    def history(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.simulation.search", "--only", "3"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    first, second = history("1"), history("2")
    assert "digest" in first and first == second


@pytest.mark.slow
def test_more_fleets_keep_the_laws() -> None:
    broken = search(iter(MORE_SEEDS), os.cpu_count() or 1, time.monotonic() + 3600.0, Totals())
    assert not broken, broken[0].problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("removals_unread", {"credit"}),
        ("follower_unheard", {"credit", "age"}),
        ("endings_denied", {"reservations"}),
    ],
)
def test_the_search_finds_a_fault_in_the_product(name: str, laws: set[str]) -> None:
    found = find(name, worlds=MOST_WORLDS)
    assert found.seed is not None and found.problem.partition(":")[0] in laws


def test_each_fault_is_an_edit_of_one_place_and_still_python() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in MUTATIONS:
        compile(mutation.source(), mutation.path, "exec")
        assert not (ROOT / mutation.path).with_suffix(".pxd").exists(), f"{mutation.path} is compiled"
