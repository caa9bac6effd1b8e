# SPDX-License-Identifier: Apache-2.0
"""Worlds of the simulation keep the laws, a seed decides all of a world, and the search finds what is broken."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from tests.simulation import aim, engine, world
from tests.simulation.coverage import LEASE_OUTCOMES, PAIRED_STATES, all_transitions, unmet_reason
from tests.simulation.engine import Kind
from tests.simulation.faults import FAULTS, Fault
from tests.simulation.mutants import find
from tests.simulation.mutations import MUTATIONS, ROOT
from tests.simulation.search import Totals, run_alone, search
from tests.simulation.twin import running
from tests.support.examples import many

# Worlds that broke a law once (docs/explanation/fault-tests.md has the laws), and one of many that did not.
SEEDS = (1, 5001, 5011, 960020)
# A world whose two runs must be equal.
TWICE_SEED = 4
# The worlds of the slow test, and the worlds in which each fault of the product must be found. `make simulate` has more.
MORE_SEEDS = range(100, 112 if many() else 106)
MOST_WORLDS = 12
# A fleet whose engine drops most of a flood, and then says nothing: it stands still, or its machine dies.
FLOODED = {
    "ROUTERS": (2,),
    "SERVERS": (1,),
    "KINDS": (Kind.STOCK,),
    "HTTP_SHARE": 0.0,
    "RANKS_SHARE": 0.0,
    "LATE_SHARE": 0.0,
}
FLOODED_SEED = 2
FLOOD = Fault(0, 20.0, "engine_flood", "e0", "", 1.0, 0.0)
SILENCES = (
    Fault(1, 20.01, "engine_stopped", "e0", "", 6.0, 0.0),
    Fault(1, 20.01, "engine_restart", "e0", "", 20.0, 0.0),
    Fault(1, 20.0, "engine_idle", "e0", "", 13.0, 0.0),
)
# A moment just after the time of a check that does not take place, because batches come.
JUST_CHECKED_S = 23.1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fleet_with_faults_keeps_the_laws(seed: int) -> None:
    outcome = run_alone(seed)
    assert not outcome.problem, "\n".join(outcome.history[-60:])
    assert outcome.faults and outcome.judgements


def test_a_seed_decides_the_whole_history() -> None:
    with running() as twin:
        outcome = run_alone(TWICE_SEED, twin=twin)
    assert outcome.digest and not outcome.problem


def test_the_table_of_a_search_has_all_that_was_met_and_all_that_was_not() -> None:
    outcome = run_alone(SEEDS[0])
    transitions = all_transitions()
    assert outcome.coverage.transitions and set(outcome.coverage.transitions) <= set(transitions)
    assert set(outcome.coverage.lease) <= set(LEASE_OUTCOMES)
    assert {kind for kind, _ in outcome.coverage.pairs} <= set(FAULTS)
    assert {state for _, state in outcome.coverage.pairs} <= set(PAIRED_STATES)
    totals = Totals()
    totals.add(outcome, 1.0)
    assert len(json.loads(totals.as_json())["transitions"]) == len(transitions)
    assert any("NEVER" in line for line in totals.table())


def test_what_no_world_can_meet_is_not_met() -> None:
    met = run_alone(SEEDS[0]).coverage.transitions
    assert not [transition for transition in met if unmet_reason(transition)]


@pytest.mark.parametrize(
    ("flood", "silence"),
    [
        *((FLOOD, silence) for silence in SILENCES),
        (replace(FLOOD, at_s=JUST_CHECKED_S), replace(SILENCES[-1], at_s=JUST_CHECKED_S)),
    ],
    ids=str,
)
def test_a_batch_that_was_dropped_before_a_silence_may_be_unknown_until_its_end_or_a_check(
    flood: Fault, silence: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in FLOODED.items():
        monkeypatch.setattr(world, name, value)
    monkeypatch.setattr(engine, "HIGH_WATER_MARKS", (20,))
    monkeypatch.setattr(aim, "AIMED_SHARE", 0.0)
    monkeypatch.setattr(world, "plan", lambda *_: [flood, silence])
    outcome = run_alone(FLOODED_SEED)
    assert outcome.faults == [flood, silence]
    assert not outcome.problem, "\n".join(outcome.history[-60:])


@pytest.mark.slow
def test_more_fleets_keep_the_laws() -> None:
    broken = search(iter(MORE_SEEDS), os.cpu_count() or 1, time.monotonic() + 3600.0, Totals())
    assert not broken, broken[0].problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("removals_unread", {"credit"}),
        ("endings_denied", {"reservations"}),
        ("arrivals_unread", {"agreement", "full credit"}),
        ("lease_of_the_living", {"lease"}),
        ("loss_counted_twice", {"counters"}),
        ("ended_requests_kept", {"bounds"}),
        # CI tries every second one: each searches worlds of its own.
    ][:: 1 if many() else 2],
)
def test_the_search_finds_a_fault_in_the_product(name: str, laws: set[str]) -> None:
    found = find(name, worlds=MOST_WORLDS)
    assert found.seed is not None and found.problem.partition(":")[0] in laws


def test_each_fault_edits_one_place_of_a_file_and_is_still_python() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in MUTATIONS:
        assert len({edit.path for edit in mutation.edits}) == len(mutation.edits)
        for edit in mutation.edits:
            compile(edit.source(), edit.path, "exec")
            assert not (ROOT / edit.path).with_suffix(".pxd").exists(), f"{edit.path} is compiled"
