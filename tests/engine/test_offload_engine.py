# SPDX-License-Identifier: Apache-2.0
"""A real engine with our CPU and disk tiers: what the router predicts of each tier is reused, and nothing else
changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

import offload_engine
from engine_process import VOCAB_SIZE
from offload_engine import OffloadEngine
from router_process import RouterProcess

from kvrouter.engine_patch.offload.disk.reader import LOOK_S

pytestmark = pytest.mark.engine

MODEL = "tiny"
WORKER = "offloading"
PROMPTS = 300
FEWER_PROMPTS = 100
# bfloat16 logits between 2 and 4 are 1/64 apart; a wrong page moves them by whole numbers.
ROUNDING = 0.08


@dataclass(frozen=True)
class Shape:
    """A model, bytes of a block over its layers, and the sizes of its tiers in blocks: each far below what the prompts
    need."""

    model: str
    block_bytes: int
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int


SHAPES = {
    # Keys and values of 32 tokens, one head of 64 numbers of 2 bytes.
    "windows": Shape("gemma3", 2 * 32 * 64 * 2, 110, 240, 700),
    # As large as its largest state; fewer blocks are worth keeping.
    "states": Shape("lfm2", 2 * 32 * 64 * 2, 90, 120, 300),
}


@dataclass(frozen=True)
class Case:
    shape: str
    count: int
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


CASES = {
    "5 windows+full, lru, 1 block a chunk": Case("windows", PROMPTS, {"eviction_policy": "lru"}),
    "5 windows+full, arc, 1 block a chunk": Case("windows", FEWER_PROMPTS, {"eviction_policy": "arc"}),
    "5 windows+full, lru, 4 blocks a chunk": Case("windows", FEWER_PROMPTS, {"blocks_per_chunk": 4}),
    "5 windows+full, arc, 4 blocks a chunk": Case(
        "windows", FEWER_PROMPTS, {"eviction_policy": "arc", "blocks_per_chunk": 4}
    ),
    "3 states+full, lru, 1 block a chunk": Case("states", PROMPTS),
    "3 states+full, arc, 1 block a chunk": Case("states", FEWER_PROMPTS, {"eviction_policy": "arc"}),
}
# Which prediction a prompt is compared with: it may load from these tiers, or from all.
TIERS: list[tuple[str, list[str] | None]] = [("gpu", []), ("cpu", ["CPU"]), ("disk", None), ("disk", None)]


@dataclass(frozen=True)
class Work:
    token_ids: tuple[int, ...]
    max_tokens: int
    # The field of the router's answer, and what the engine may load from.
    predicted: str
    tiers: list[str] | None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda name: getattr(offload_engine, name)(folder / name))


@pytest.fixture(scope="module")
def plain(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Callable[[str], list[Any]]:
    """What an engine without offloading says to the same prompts."""

    @cache
    def answers(shape: str) -> list[Any]:
        made = SHAPES[shape]
        folder = tmp_path_factory.mktemp("plain") / "engine"
        with OffloadEngine(folder, models(made.model), made.gpu_blocks, None) as engine:
            return [engine.run(one.token_ids, one.max_tokens) for one in workload(shape, seed)]

    return answers


def workload(shape: str, seed: int) -> Iterator[Work]:
    """Conversations that grow, come back, are cut and branched: far more than all tiers hold."""
    rng = Random(f"{seed} {shape}")
    known = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(100, 500))) for _ in range(6)]
    for _ in range(PROMPTS):
        token_ids = known[-rng.randint(1, min(len(known), rng.choice((3, 12, 40))))]
        kind = rng.random()
        if kind < 0.4:
            token_ids += tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(20, 200)))
        elif kind < 0.7:
            kept = token_ids[: rng.randint(len(token_ids) // 2, len(token_ids))]
            token_ids = (*kept, rng.randrange(3, VOCAB_SIZE))
        elif kind < 0.8:
            token_ids = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(200, 600)))
        token_ids = token_ids[:900]
        known.append(token_ids)
        yield Work(token_ids, rng.randint(1, 4), *rng.choice(TIERS))


def offload(case: Case, disk: Path) -> dict[str, Any]:
    """Tiers of so many blocks, whatever a chunk is."""
    shape = SHAPES[case.shape]
    chunk_bytes = shape.block_bytes * int(case.settings.get("blocks_per_chunk", 1))
    records = shape.disk_blocks * shape.block_bytes // chunk_bytes
    slots = disk.parent / "slots"
    slots.mkdir(exist_ok=True)
    return {
        "shared_memory_path": str(slots),
        "cpu_bytes_to_use": shape.cpu_blocks * shape.block_bytes,
        "disk_path": str(disk),
        # A record takes its chunk's bytes, which are whole pages here.
        "disk_bytes_to_use": records * chunk_bytes,
        **case.settings,
    }


def settled(router: RouterProcess, engine: OffloadEngine) -> dict[str, Any]:
    """The worker's row once a heartbeat has proven that the router holds what the ledger says now, and its answers show
    it."""
    blocks = {place: count for place, (count, _) in engine.do("ledger").items()}
    last_seq = engine.do("last_seq")

    def same(row: dict[str, Any]) -> bool:
        return row["seq"] == last_seq and {place: n for place, n in row["residency"].items() if n} == blocks

    return router.wait_proven(WORKER, same)


def alike(answer: dict[str, Any], truth: dict[str, Any]) -> bool:
    """The same tokens, and the same logprobs but for rounding: what is cached decides how a prefill is cut into
    pieces."""
    if answer["token_ids"] != truth["token_ids"]:
        return False
    for ours, theirs in zip(answer["logprobs"], truth["logprobs"], strict=True):
        known = dict(map(tuple, theirs))
        shared = [(logprob, known[token]) for token, logprob in ours if token in known]
        # Two of the last among the likeliest may change places.
        if len(shared) < len(ours) - 1 or any(abs(a - b) > ROUNDING for a, b in shared):
            return False
    return True


class Run:
    """Prompts asked of the router first and of the engine then."""

    def __init__(self, router: RouterProcess, engine: OffloadEngine) -> None:
        self._router, self._engine = router, engine
        self.wrong: list[str] = []
        self.other: list[str] = []
        self.exact = 0
        self.asked = dict.fromkeys(("gpu", "cpu", "disk"), 0)
        self.hits = dict.fromkeys(self.asked, 0)
        self.beyond = {"cpu": 0, "disk": 0}

    def ask(self, number: int, work: Work, truth: dict[str, Any]) -> None:
        """truth: what an engine without offloading says to it."""
        settled(self._router, self._engine)
        found = self._router.query(MODEL, WORKER, work.token_ids, None)
        answer = self._engine.run(work.token_ids, work.max_tokens, work.tiers)
        self.asked[work.predicted] += 1
        self.hits[work.predicted] += answer["cached"] > 0
        self.beyond["cpu"] += found["cpu"] > found["gpu"]
        self.beyond["disk"] += found["disk"] > found["cpu"]
        what = f"prompt {number}, {len(work.token_ids)} tokens, {work.predicted}: {found}, reused {answer['cached']}"
        if answer["cached"] != found[work.predicted]:
            self.wrong.append(what)
        self.exact += answer["logprobs"] == truth["logprobs"]
        if not alike(answer, truth):
            self.other.append(f"{what}\n  {answer}\n  {truth}")

    def row(self, name: str, pages: int) -> tuple[str, ...]:
        total = sum(self.asked.values())
        return (
            name,
            str(total),
            str(total - len(self.wrong)),
            f"{total - len(self.other)}, {self.exact} exactly",
            *(f"{self.hits[tier]}/{self.asked[tier]}" for tier in self.asked),
            str(self.beyond["cpu"]),
            str(self.beyond["disk"]),
            str(pages),
        )


HEADINGS = (
    "model, tiers",
    "prompts",
    "predicted",
    "same logprobs",
    "gpu hits",
    "cpu hits",
    "disk hits",
    "cpu > gpu",
    "disk > cpu",
    "same pages",
)


@pytest.mark.parametrize("name", CASES)
def test_every_tier_is_predicted(
    name: str,
    router: RouterProcess,
    models: Callable[[str], Path],
    plain: Callable[[str], list[Any]],
    tmp_path: Path,
    seed: int,
    table: Callable[..., None],
) -> None:
    case = CASES[name]
    shape = SHAPES[case.shape]
    truth = plain(case.shape)
    model = models(shape.model)
    with OffloadEngine(tmp_path / "engine", model, shape.gpu_blocks, offload(case, tmp_path / "disk")) as engine:
        run = Run(router, engine)
        router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
        try:
            for number, work in enumerate(workload(case.shape, seed)):
                if number < case.count:
                    run.ask(number, work, truth[number])
            row = settled(router, engine)
            ledger, resident = engine.do("ledger"), engine.do("resident")
            same, counts = engine.do("same_bytes"), engine.do("counts")
        finally:
            router.unregister(WORKER)
    assert not list((tmp_path / "slots").iterdir()), "memory that outlives its engine"
    table("Real engine with CPU and disk tiers", HEADINGS, run.row(name, same["compared"]))
    assert not run.wrong, "\n".join(run.wrong[:8])
    assert not run.other, "\n".join(run.other[:8])
    assert ledger == resident
    assert row["patch"]["mismatches"] == 0
    assert same["compared"] > 10 and same["different"] == 0
    assert min(run.hits.values()) > 3 and min(run.beyond.values()) > 3
    assert counts["vllm:kvrouter_offload_promotions"] > 20
    assert counts["vllm:kvrouter_offload_promotions_refused"] == 0


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
    """Killed in the middle of its work, three times; the next life on the same folder answers as if nothing had
    been."""
    case = Case("windows", FEWER_PROMPTS, {"blocks_per_chunk": blocks_per_chunk})
    shape = SHAPES[case.shape]
    truth, work = plain(case.shape), list(workload(case.shape, seed))[:FEWER_PROMPTS]
    rng = Random(f"{seed} kills {blocks_per_chunk}")
    settings, model = offload(case, tmp_path / "disk"), models(shape.model)
    found = []
    for life in range(3):
        with OffloadEngine(tmp_path / f"life{life}", model, shape.gpu_blocks, settings) as engine:
            found.append(sum(count for place, (count, _) in engine.do("resident").items() if ":STORAGE" in place))
            assert bool(found[-1]) == (life > 0)
            for one in work[:20]:
                engine.run(one.token_ids, one.max_tokens)
            killer = threading.Timer(rng.uniform(0.0, 0.5), engine.kill)
            killer.start()
            try:
                with pytest.raises((AssertionError, BrokenPipeError)):
                    for one in work[20:]:
                        engine.run(one.token_ids, one.max_tokens)
            finally:
                killer.join()
    with OffloadEngine(tmp_path / "last", model, shape.gpu_blocks, settings) as engine:
        run = Run(router, engine)
        router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
        try:
            settled(router, engine)
            # Nothing has run: what it found is announced all the same.
            assert engine.do("ledger") == engine.do("resident") != {}
            for number, one in enumerate(work):
                run.ask(number, one, truth[number])
            counts = engine.do("counts")
        finally:
            router.unregister(WORKER)
    assert not list((tmp_path / "slots").iterdir()), "memory of engines that are gone"
    table("Killed three times, then asked", HEADINGS, run.row(f"{blocks_per_chunk} a chunk, found {found}", 0))
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
    """Both serve, one writes the folder and evicts from it; what each can read of it is predicted for each."""
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
    """vLLM's own tier says nothing when a reset empties it; ours does, also to those who know no patch."""
    case, shape = Case("windows", 0), SHAPES["windows"]
    settings = offload(case, tmp_path / "disk")
    everywhere = {"GPU", "CPU", "STORAGE:kvrouter"}
    for patch in (True, False):
        folder = tmp_path / f"patch{patch}"
        with OffloadEngine(folder, models(shape.model), shape.gpu_blocks, settings, patch) as engine:
            router.register(WORKER, MODEL, engine.endpoint, engine.replay_endpoint)
            try:
                (router.wait_proven if patch else router.wait_connected)(WORKER)
                for one in list(workload("windows", seed))[:12]:
                    engine.run(one.token_ids, one.max_tokens)
                assert _media(engine.do("resident")) == everywhere
                _until(router, everywhere)
                assert engine.do("reset", connector=True)
                assert engine.do("resident") == {}
                _until(router, set())
            finally:
                router.unregister(WORKER)


def _catch_up(reader: OffloadEngine, writer: OffloadEngine) -> None:
    """An engine that rests looks when it steps again, and not too often. The keys alone may be the same while one of
    them has moved to another record: a read of the old one is a miss."""
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
