# SPDX-License-Identifier: Apache-2.0
"""Placement by whole routers in front of simulated engines.

Chats that share a beginning are placed so that their histories stay in memory.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.choice_fleet import LiveFleet, simulated
from benchmarks.choice_worlds import Finding, run

# The share by which reuse may fall below that under round robin: a choice between equals cannot avoid it.
TOLERANCE = 0.03


def reuse_on_turn_2(folder: Path, policy: str) -> float:
    """Return the share of the second turn's prompt tokens that engines reused under a policy."""
    scenario = Finding(turns=2)
    with ExitStack() as stack:
        flags = [["--blocks", str(scenario.blocks), "--instant"]] * scenario.replicas
        fleet = LiveFleet(folder / policy, stack, simulated, flags, policy)
        result = asyncio.run(run(scenario, fleet, seed=1))
    assert not result["failed"]
    return float(result["reuse by turn"][1])


@pytest.mark.slow
def test_chats_with_a_common_beginning_are_reused_as_much_as_under_round_robin(tmp_path: Path) -> None:
    assert reuse_on_turn_2(tmp_path, "kv") >= reuse_on_turn_2(tmp_path, "round_robin") - TOLERANCE
