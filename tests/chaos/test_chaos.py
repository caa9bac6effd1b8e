# SPDX-License-Identifier: Apache-2.0
"""The short part of `make chaos`: one schedule with a fixed seed for every kind of fault that needs real processes.

The other kinds change only which batches and replies arrive, and when. The simulation (`tests/simulation/`) and the models of
the cursors (`tests/property/`) meet them thousands of times; `make chaos` has them, too.

Faults of a second kind are met by the simulation, too, and another kind here has the same part of the system: Valkey that
crashes and starts again, a connection that hangs, a router that is killed. They run with KVROUTER_TEST_EXAMPLES=many.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.chaos.harness.fleet import KINDS, run_all, schedule
from tests.chaos.harness.report import table
from tests.support.examples import many

FIRST_SEED = 20_000
AT_ONCE = 8
# Nothing of these faults is in a socket, a process, or Valkey.
SIMULATED = {
    *("batches_unsent", "batches_lost", "batches_doubled", "batches_swapped"),
    *("replay_gone", "replay_ring_short", "replay_slow", "replay_lies"),
    *("restart_with_another_layout", "store_flushed", "store_slow", "wire_delay"),
}
# The fault of the simulation, and the kind that stays here.
REPEATED = {
    # engine_restart; restart_past_the_old_seq
    *("engine_restart", "restart_at_the_old_seq", "engine_stopped"),
    # link_cut, link_hang; wire_half_open, wire_stall
    *("wire_cut", "wire_narrow"),
    # store_crash that loses all, store_flush; store_restart
    "store_restart_empty",
    # store_stopped; store_hangs, whose routers are processes
    *("store_stopped", "store_silent"),
    # link_cut and router_pause; router_killed, router_stopped
    "router_cut_off",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_ghosts_through_any_fault(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = SIMULATED if many() else SIMULATED | REPEATED
    assert set(KINDS) > left_out and not SIMULATED & REPEATED
    schedules = [schedule(FIRST_SEED + i, kind) for i, kind in enumerate(KINDS) if kind not in left_out]
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
