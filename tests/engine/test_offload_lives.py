# SPDX-License-Identifier: Apache-2.0
"""Engines with our CPU and disk tiers that are killed, that share a folder, and that are reset.

The predicted hit of each tier is still reused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvrouter.engine_patch.offload.disk.reader import LOOK_S
from tests.engine.offload_engine import OffloadEngine
from tests.engine.offload_workload import (
    FEWER_PROMPTS,
    HEADINGS,
    MODEL,
    SHAPES,
    WORKER,
    Case,
    Run,
    alike,
    offload,
    settled,
    workload,
)
from tests.support.router_process import RouterProcess

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_after_a_kill_what_is_announced_is_there(
    blocks_per_chunk: int,
    router: RouterProcess,
    models: Callable[[str], Path],
    plain: Callable[[str], list[Any]],
    tmp_path: Path,
    seed: int,
    table: Callable[..., None],
) -> None:
    """Kill an engine three times in the middle of its work, and compare the answers of the next life on its folder."""
    case = Case("windows", FEWER_PROMPTS, {"blocks_per_chunk": blocks_per_chunk})
    shape = SHAPES[case.shape]
    truth, work = plain(case.shape), list(workload(case.shape, seed))[:FEWER_PROMPTS]
    rng = Random(f"{seed} kills {blocks_per_chunk}")
    settings, model = offload(case, tmp_path / "disk"), models(shape.model)
    blocks_on_disk = []
    for life in range(3):
        with OffloadEngine(tmp_path / f"life{life}", model, shape.gpu_blocks, settings) as engine:
            blocks_on_disk.append(
                sum(count for place, (count, _) in engine.do("resident").items() if ":STORAGE" in place)
            )
            assert bool(blocks_on_disk[-1]) == (life > 0)
            for prompt in work[:20]:
                engine.run(prompt.token_ids, prompt.max_tokens)
            killer = threading.Timer(rng.uniform(0.0, 0.5), engine.kill)
            killer.start()
            try:
                with pytest.raises((AssertionError, BrokenPipeError)):
                    for prompt in work[20:]:
                        engine.run(prompt.token_ids, prompt.max_tokens)
            finally:
                killer.join()
    with OffloadEngine(tmp_path / "last", model, shape.gpu_blocks, settings) as engine:
        run = Run(router, engine)
        router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
        try:
            settled(router, engine)
            # The engine has not run yet, but it has announced the blocks that it found on disk.
            assert engine.do("ledger") == engine.do("resident") != {}
            for number, prompt in enumerate(work):
                run.ask(number, prompt, truth[number])
            counts = engine.do("counts")
        finally:
            router.unregister(WORKER)
    assert not list((tmp_path / "slots").iterdir()), "memory of engines that are gone"
    table(
        "Killed three times, then queried", HEADINGS, run.row(f"{blocks_per_chunk} a chunk, found {blocks_on_disk}", 0)
    )
    assert not run.wrong, "\n".join(run.wrong[:8])
    assert not run.other, "\n".join(run.other[:8])
    assert counts["vllm:kvrouter_offload_promotions"] > 10
    assert counts["vllm:kvrouter_offload_promotions_failed"] == 0


def test_an_engine_that_reads_what_another_one_writes(
    router: RouterProcess,
    models: Callable[[str], Path],
    plain: Callable[[str], list[Any]],
    tmp_path: Path,
    seed: int,
    table: Callable[..., None],
) -> None:
    """Let two engines serve, one of which writes the folder and evicts from it, and compare the other one's hits."""
    case, shape = Case("windows", FEWER_PROMPTS), SHAPES["windows"]
    truth, model = plain(case.shape), models(shape.model)
    writing = offload(case, tmp_path / "disk")
    reading = {name: value for name, value in writing.items() if name != "disk_bytes_to_use"} | {"disk_read_only": True}
    rng = Random(f"{seed} shared")
    with (
        OffloadEngine(tmp_path / "writer", model, shape.gpu_blocks, writing) as writer,
        OffloadEngine(tmp_path / "reader", model, shape.gpu_blocks, reading) as reader,
    ):
        run = Run(router, reader)
        router.register(WORKER, MODEL, reader.endpoint, reader.replay_endpoint)
        try:
            for number, work in enumerate(list(workload(case.shape, seed))[:FEWER_PROMPTS]):
                if rng.random() < 0.8:
                    answer = writer.run(work.token_ids, work.max_tokens)
                    assert alike(answer, truth[number])
                _catch_up(reader, writer)
                run.ask(number, work, truth[number])
            row = settled(router, reader)
            assert reader.do("ledger") == reader.do("resident")
            assert _on_disk(reader) == _on_disk(writer) != {}
            counts = reader.do("counts")
        finally:
            router.unregister(WORKER)
    table("Real engine that reads what another one writes", HEADINGS, run.row("5 windows+full, lru", 0))
    assert not run.wrong, "\n".join(run.wrong[:8])
    assert not run.other, "\n".join(run.other[:8])
    assert row["patch"]["mismatches"] == 0
    assert run.beyond["disk"] > 10 and run.hits["disk"] > 10
    assert counts["vllm:kvrouter_offload_promotions"] > 20
    assert counts["vllm:kvrouter_offload_disk_written_bytes"] == 0


def test_resets_empty_both_tiers_at_once_and_on_the_stock_topic_too(
    router: RouterProcess, models: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    """Reset an engine, and check that the router empties both tiers, also without the patch.

    vLLM's own tier reports nothing when a reset empties it; ours does, also to consumers that do not know the patch.
    """
    case, shape = Case("windows", 0), SHAPES["windows"]
    settings = offload(case, tmp_path / "disk")
    everywhere = {"GPU", "CPU", "STORAGE:kvrouter"}
    for patch in (True, False):
        folder = tmp_path / f"patch{patch}"
        with OffloadEngine(folder, models(shape.model), shape.gpu_blocks, settings, patch) as engine:
            router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
            try:
                (router.wait_proven if patch else router.wait_connected)(WORKER)
                for prompt in list(workload("windows", seed))[:12]:
                    engine.run(prompt.token_ids, prompt.max_tokens)
                assert _media(engine.do("resident")) == everywhere
                _until(router, everywhere)
                assert engine.do("reset", connector=True)
                assert engine.do("resident") == {}
                _until(router, set())
            finally:
                router.unregister(WORKER)


def _catch_up(reader: OffloadEngine, writer: OffloadEngine) -> None:
    """Step the reader until it knows all that the writer has on disk.

    A resting engine looks at the folder when it steps again, and not too often. Equal keys are not enough, because a
    key may have moved to another record, and a read of the old record is a miss.
    """
    deadline_s = time.monotonic() + 30.0
    while not reader.do("saw_all") or _on_disk(reader) != _on_disk(writer):
        assert time.monotonic() < deadline_s
        time.sleep(LOOK_S / 10)
        reader.run((3,), 1)


def _on_disk(engine: OffloadEngine) -> dict[str, Any]:
    return {place: count for place, count in engine.do("resident").items() if ":STORAGE" in place}


def _media(places: dict[str, Any]) -> set[str]:
    return {place.partition(":")[2] for place, count in places.items() if count}


def _until(router: RouterProcess, media: set[str]) -> None:
    deadline_s = time.monotonic() + 30.0
    while _media((row := router.worker(WORKER))["residency"]) != media:
        assert time.monotonic() < deadline_s, f"{media}: {row}"
        time.sleep(0.02)
