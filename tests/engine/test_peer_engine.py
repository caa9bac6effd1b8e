# SPDX-License-Identifier: Apache-2.0
"""Two real engines that fetch chunks from each other by NIXL: answers are those of an engine without any cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl_cu12")

from kvrouter.engine_patch.offload.metrics import PREFIX
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import SHAPES, alike, workload
from tests.support.ports import free_port

pytestmark = pytest.mark.engine

PROMPTS = 60
TIMEOUT_S = 2.0
MISS = f"{PREFIX}peer_miss_"


@pytest.fixture(autouse=True)
def transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have UCX use TCP, as between two machines."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def settings(shape: str, folder: Path, port: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "shared_memory_path": str(folder),
        "cpu_bytes_to_use": SHAPES[shape].cpu_blocks * SHAPES[shape].block_bytes,
        "peer_port": port,
        "peer_timeout_s": TIMEOUT_S,
    }


def misses(engine: OffloadEngine) -> dict[str, int]:
    counts = engine.do("counts")
    return {name.removeprefix(MISS): count for name, count in counts.items() if name.startswith(MISS) and count}


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_another_engine_give_the_same_answers(
    shape: str, models: Callable[[str], Path], plain: Callable[[str], list[Any]], tmp_path: Path, seed: int
) -> None:
    truth = plain(shape)
    model, blocks = models(SHAPES[shape].model), SHAPES[shape].gpu_blocks
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                OffloadEngine(tmp_path / f"engine{n}", model, blocks, settings(shape, tmp_path / f"slots{n}", port))
            )
            for n, port in enumerate(ports)
        ]
        wrong: list[str] = []
        fetched_prompts = 0
        for number, work in enumerate(workload(shape, seed)):
            if number >= PROMPTS:
                break
            # Each prompt runs on one engine, and then on the other, which may fetch what it lacks.
            first = number % 2
            engines[first].run(work.token_ids, work.max_tokens)
            before = engines[1 - first].do("counts")[f"{PREFIX}peer_pulled"]
            answer = engines[1 - first].run(work.token_ids, work.max_tokens, source=ports[first])
            fetched_prompts += engines[1 - first].do("counts")[f"{PREFIX}peer_pulled"] > before
            if not alike(answer, truth[number]):
                wrong.append(f"prompt {number}: {answer} {truth[number]}")
        same = [engine.do("same_bytes") for engine in engines]
        ledgers = [(engine.do("ledger"), engine.do("resident")) for engine in engines]
        found = [misses(engine) for engine in engines]
    assert not wrong, "\n".join(wrong[:4])
    assert fetched_prompts > PROMPTS // 2
    assert all(row["compared"] > 5 and row["different"] == 0 for row in same)
    assert all(ledger == resident for ledger, resident in ledgers)
    assert all(set(row) <= {"absent", "no_room"} for row in found), found


def test_a_source_that_stands_still_or_dies_costs_a_deadline_and_no_answer(
    models: Callable[[str], Path], plain: Callable[[str], list[Any]], tmp_path: Path, seed: int
) -> None:
    truth = plain("windows")
    model, blocks = models("gemma3"), SHAPES["windows"].gpu_blocks
    works = [work for number, work in enumerate(workload("windows", seed)) if number < 8]
    # The last prompts are surely in the source's CPU tier.
    last, *others = range(7, 3, -1)
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        source, reader = (
            stack.enter_context(
                OffloadEngine(tmp_path / f"engine{n}", model, blocks, settings("windows", tmp_path / f"slots{n}", port))
            )
            for n, port in enumerate(ports)
        )
        for work in works:
            source.run(work.token_ids, work.max_tokens)
        assert alike(reader.run(works[last].token_ids, works[last].max_tokens, source=ports[0]), truth[last])
        assert reader.do("counts")[f"{PREFIX}peer_pulled"] > 0 and set(misses(reader)) <= {"absent"}
        source.pause()
        try:
            for number in others[:1]:
                work = works[number]
                assert alike(reader.run(work.token_ids, work.max_tokens, source=ports[0]), truth[number])
        finally:
            source.resume()
        assert set(misses(reader)) <= {"deadline", "absent"} and misses(reader)["deadline"] > 0
        source.kill()
        for number in others[1:]:
            work = works[number]
            assert alike(reader.run(work.token_ids, work.max_tokens, source=ports[0]), truth[number])
        assert reader.do("ledger") == reader.do("resident")
