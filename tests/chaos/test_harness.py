# SPDX-License-Identifier: Apache-2.0
"""Tests that the harness detects a defective router: four defects in `Ingest.apply`, each of which must be found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvrouter.events.patch.items import NewEpoch, ReportBatch, ReportGap
from kvrouter.events.vllm.stream_items import Batch, GapLost, Restarted
from kvrouter.router.index.ingest.ingest import Ingest
from tests.chaos.harness.fleet import run_all
from tests.chaos.harness.schedule import Schedule
from tests.chaos.harness.stage import Outcome

# A defect may not show in every schedule, but it does in at least one of these.
SEEDS = range(30_000, 30_004)

# A defective router stays wrong, so a short wait is enough.
SETTLE_S = 6.0

Apply = Callable[[Ingest, Any, float], None]
honest: Apply = Ingest.apply


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def gap_ignored(ingest: Ingest, item: Any, now: float) -> None:
    if not isinstance(item, GapLost | ReportGap):
        honest(ingest, item, now)


def restart_ignored(ingest: Ingest, item: Any, now: float) -> None:
    if not isinstance(item, Restarted | NewEpoch):
        honest(ingest, item, now)


def batch_twice(ingest: Ingest, item: Any, now: float) -> None:
    honest(ingest, item, now)
    # If all batches were applied twice, the errors would cancel out: blocks stored twice would be removed twice.
    if isinstance(item, Batch | ReportBatch) and item.seq % 3 == 0:
        honest(ingest, item, now)


def removals_lost(ingest: Ingest, item: Any, now: float) -> None:
    before = ingest.held.blocks.remove_copies
    # The first removal of each run is lost.
    ingest.held.blocks.remove_copies = lambda place, hashes: before(place, hashes[1:])  # type: ignore[method-assign]
    try:
        honest(ingest, item, now)
    finally:
        del ingest.held.blocks.remove_copies


def found(fault: str) -> list[Outcome]:
    schedules = [Schedule(seed, fault, settle_s=SETTLE_S) for seed in SEEDS]
    outcomes = asyncio.run(run_all(schedules, at_once=len(schedules)))
    return [outcome for outcome in outcomes if outcome.failures]


GHOSTS = "ghosts, first"
# The store may refuse a seq that does not continue the committed ones, whatever the ingest's state is. Then the worker
# never settles, and there are no ghosts.
NEVER = "not settled"


@pytest.mark.parametrize(
    ("defect", "fault", "seen"),
    [
        (gap_ignored, "batches_lost", (GHOSTS, NEVER)),
        (restart_ignored, "engine_restart", (GHOSTS, NEVER)),
        (batch_twice, "batches_doubled", (GHOSTS,)),
        (removals_lost, "wire_cut", (GHOSTS,)),
    ],
)
def test_a_defect_is_found_and_reported(
    defect: Apply, fault: str, seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ingest, "apply", defect)
    # Batches that are applied together would evade the defect.
    monkeypatch.setattr(Ingest, "apply_next", lambda self, items, now: self.apply(items.popleft(), now))
    wrong = found(fault)
    assert wrong
    assert any(symptom in text for outcome in wrong for text in outcome.failures for symptom in seen)
    assert all(any("WRONG" in line for line in outcome.trace) for outcome in wrong)
