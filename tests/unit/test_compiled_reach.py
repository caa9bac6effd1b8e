# SPDX-License-Identifier: Apache-2.0
"""`make test-uncompiled` leaves out no file that can run a compiled module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compiled_reach import CONTRACTS, REPEATED, reaches_compiled

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "name",
    [
        "property/test_plain_head.py",  # imports a compiled module
        "property/test_numbers.py",  # imports one that is written in Cython
        "unit/test_choose.py",  # through others
        "simulation/test_simulation.py",  # through all rooms of a router
        "contract/test_uncompiled.py",  # starts processes
    ],
)
def test_a_file_that_can_run_a_compiled_module_is_run(name: str) -> None:
    assert reaches_compiled(TESTS / name)


@pytest.mark.parametrize(
    "name",
    [
        "unit/test_ledger.py",
        "simulation/test_store_contract.py",
        "contract/test_over_tls.py",
        "unit/test_replay_runs.py",
    ],
)
def test_a_file_that_runs_no_compiled_module_or_repeats_other_tests_is_left_out(name: str) -> None:
    assert not reaches_compiled(TESTS / name)


def test_every_file_that_is_named_is_there() -> None:
    found = {path.name for path in TESTS.rglob("test_*.py")}
    assert set(CONTRACTS) | set(REPEATED) <= found
