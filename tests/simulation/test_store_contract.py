# SPDX-License-Identifier: Apache-2.0
"""The store of the simulation answers like a real server, and the comparison finds each part of it that does not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.simulation.store import contract
from tests.simulation.store.contract import Answer, RealSide, SimulatedSide, Step, Talk
from tests.simulation.store.keyspace import Keyspace
from tests.support.store_server import StoreServer

# Nodes of streams are limited by entries alone: their sizes depend on the ids, which each server makes by its clock.
OPTIONS = ("--stream-node-max-bytes", "0")
SEEDS = range(12)
COMMANDS = 600


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSide]:
    with StoreServer(tmp_path_factory.mktemp("store"), *OPTIONS) as server:
        side = RealSide(server.port)
        yield side
        side.close()


def simulated() -> SimulatedSide:
    return SimulatedSide(Keyspace(node_bytes=0))


def recorded(seed: int, real: RealSide | None, commands: int = COMMANDS) -> list[tuple[Step, list[Answer]]]:
    """Play a sequence on the simulated store, and compare each step with the real one."""
    here = simulated()
    talk, other = Talk(here), None if real is None else Talk(real)
    history: list[tuple[Step, list[Answer]]] = []
    for step in contract.steps(talk, random.Random(seed), commands):
        answers = talk.play(step)
        if other is not None:
            assert other.play(step, answers) == answers, f"seed {seed}, step {len(history)}: {step}"
        history.append((step, answers))
    assert here.node.copy_of_all().image() == here.node.space.image()
    return history


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_get_equal_answers(real: RealSide, seed: int) -> None:
    real.ask("FLUSHALL")
    recorded(seed, real)
