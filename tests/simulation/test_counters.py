# SPDX-License-Identifier: Apache-2.0
"""The law of counters: a router takes in each batch once, or again where it reads the engine's buffer again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from tests.simulation.counters import HELD, READ_AGAIN, _batches

WORKER = WorkerKey("m", "e0", 1)
SENT = 5


def problems(batches: int, *lines: str) -> list[str]:
    """Return what the law finds at a router that followed a worker once and counts these batches."""
    registry = SimpleNamespace(
        worker_labels=lambda worker: ("m", "e0"),
        get_sample_value=lambda name, labels: batches if name == "kvrouter_ingest_batches_total" else 0,
    )
    followers = {WORKER: SimpleNamespace(lease=SimpleNamespace(held=True))}
    core = SimpleNamespace(registry=SimpleNamespace(followers=followers))
    router = SimpleNamespace(core=core, token="t", registries={"t": registry})
    spans = [SimpleNamespace(life=SimpleNamespace(next_seq=SENT))]
    engine = SimpleNamespace(name="e0.1", worker=WORKER, spans=spans)
    held = f"{HELD} worker={WORKER} epoch=1 seq=None"
    return list(_batches(cast(Any, router), cast(Any, engine), [held, *lines]))


def test_batch_that_was_taken_in_twice_is_found() -> None:
    assert not problems(SENT)
    assert problems(SENT + 1) == ["counts 6 batches of e0.1, which sent 5"]


@pytest.mark.parametrize(("rank", "is_judged"), [(1, False), (0, True)])
def test_buffer_that_was_read_again_excuses_its_own_engine(rank: int, is_judged: bool) -> None:
    worker = WorkerKey("m", "e0", rank)
    assert bool(problems(SENT + 1, f"stream state worker={worker} state=catching_up {READ_AGAIN}: all")) is is_judged
