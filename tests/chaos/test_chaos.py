# SPDX-License-Identifier: Apache-2.0
"""The short part of `make chaos`: one schedule with a fixed seed for every kind of fault that needs real processes.

The other kinds change only which batches and replies arrive, and when. The simulation (`tests/simulation/`) and the models of
the cursors (`tests/property/`) meet them thousands of times; `make chaos` has them, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.chaos.harness.fleet import KINDS, run_all, schedule
from tests.chaos.harness.report import table

FIRST_SEED = 20_000
AT_ONCE = 8
# Nothing of these faults is in a socket, a process, or Valkey.
SIMULATED = {
    *("batches_unsent", "batches_lost", "batches_doubled", "batches_swapped"),
    *("replay_gone", "replay_ring_short", "replay_slow", "replay_lies"),
    *("restart_with_another_layout", "store_flushed", "store_slow", "wire_delay"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_ghosts_through_any_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(KINDS) > SIMULATED
    schedules = [schedule(FIRST_SEED + i, kind) for i, kind in enumerate(KINDS) if kind not in SIMULATED]
    outcomes = asyncio.run(run_all(schedules, at_once=AT_ONCE))
    print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.failures]
    texts = [
        "\n".join(
            [
                f"seed {o.seed}, {o.fault} (python -m tests.chaos.run --seed {o.seed} --only {o.fault})",
                *o.failures,
                *o.trace,
            ]
        )
        for o in wrong
    ]
    assert not wrong, "\n\n".join(texts)
    assert all(outcome.faults and outcome.samples for outcome in outcomes)
