# SPDX-License-Identifier: Apache-2.0
"""Worlds of the simulation keep the laws, a seed decides all of a world, and the search finds what is broken."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import pytest

from tests.simulation.search import Totals, law_of, run_alone, search

SEEDS = (3, 12)
# The worlds of the slow test, and the worlds in which each mutation must be found.
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
    ("mutation", "laws"),
    [
        ("removals_lost", {"credit"}),
        ("followers_believed", {"credit", "age"}),
        ("endings_lost", {"reservations"}),
    ],
)
def test_the_search_finds_a_mutation(mutation: str, laws: set[str]) -> None:
    seeds = itertools.islice(itertools.count(1), MOST_WORLDS)
    broken = search(seeds, os.cpu_count() or 1, time.monotonic() + 3600.0, Totals(), mutation=mutation)
    assert broken and law_of(broken[0]) in laws
