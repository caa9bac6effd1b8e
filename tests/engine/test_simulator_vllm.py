# SPDX-License-Identifier: Apache-2.0
"""The simulator gives the same hits and the same event batches as vLLM's own Scheduler for the same requests."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvrouter.simulator.cache.cpu_tier import EvictedChunk, OffloadedChunk
from kvrouter.simulator.cache.pool import Removed, Stored
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.engine.replica import Replica
from tests.engine.simulator_twin import (
    DENSE,
    GEOMETRIES,
    LONGEST_TOKENS,
    MAX_RUNNING,
    Batch,
    Engine,
    fewest_blocks,
    requests,
    tuplify,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own
]


@pytest.fixture(autouse=True)
def plain_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def geometry_of(name: str, keep: int | str | None) -> Geometry:
    make = GEOMETRIES[name]
    if isinstance(keep, str):
        if name in DENSE:
            pytest.skip("vLLM refuses an interval where no group is sparse")
        keep = 2 * make(0).scheduler_block_size
    return make(keep)


def count_events(counts: Counter[str], told: list[Batch]) -> None:
    counts["batches"] += len(told)
    for event in (event for batch in told for event in batch):
        counts["removed"] += isinstance(event, Removed)
        if isinstance(event, Stored):
            counts["stored"] += 1
            counts["sparse"] += len(event.hashes) * event.block_size < len(event.tokens)
        counts["offloaded"] += isinstance(event, OffloadedChunk)
        counts["evicted"] += isinstance(event, EvictedChunk)


# After this many steps without a token or the end of a transfer, nothing will ever come. In a pool that barely holds
# one prompt, vLLM admits loads whose requests then cannot go on, and it does not preempt these requests.
STUCK_STEPS = 40

KEEPS = [0, None, "every second boundary"]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_one_request_after_another(name: str, keep: int | str | None, tmp_path: Path) -> None:
    geometry = geometry_of(name, keep)
    seed = f"{name} {keep}"
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for chunk_tokens, spare_blocks in ((72, 2), (8192, 200)):
        blocks = fewest_blocks(geometry, LONGEST_TOKENS, chunk_tokens) + spare_blocks
        folder = tmp_path / str(chunk_tokens)
        folder.mkdir()
        engine = Engine(geometry, blocks, chunk_tokens, folder)
        batches: list[Batch] = []
        replica = Replica(geometry, blocks, on_step=batches.append, chunk_tokens=chunk_tokens)
        for prompt, max_tokens, salt in requests(rng, 50):
            if rng.random() < 0.02:
                assert replica.reset_prefix_cache() == engine.scheduler.reset_prefix_cache()
            expected = engine.run(prompt, max_tokens, salt)
            where = f"{seed}, request {counts['requests']}, {len(prompt)} tokens"
            assert replica.find(prompt, cache_salt=salt).tokens == expected.reused_tokens, where
            assert replica.run(prompt, max_tokens=max_tokens, cache_salt=salt) == expected, where
            assert batches == [[tuplify(event, geometry) for event in batch] for batch in engine.batches], where
            counts["requests"] += 1
            counts["hits"] += expected.reused_tokens > 0
            count_events(counts, batches)
            batches.clear()
            engine.batches.clear()
    print(f"\n{seed}: {dict(counts)}")
    # A window of one token needs no earlier block, so sparse retention keeps none and vLLM's finder never hits.
    assert counts["hits"] or name == "gpt-oss window of one token"
    assert counts["removed"]


class Twins:
    """One vLLM scheduler and one replica that get the same requests; each step of both must be the same."""

    def __init__(self, geometry: Geometry, blocks: int, chunk_tokens: int, folder: Path, cpu_chunks: int = 0) -> None:
        folder.mkdir()
        self.geometry = geometry
        self.engine = Engine(geometry, blocks, chunk_tokens, folder, cpu_chunks=cpu_chunks)
        self.told: list[Batch] = []
        self.replica = Replica(
            geometry,
            blocks,
            on_step=self.told.append,
            chunk_tokens=chunk_tokens,
            max_running=MAX_RUNNING,
            cpu_chunks=self.engine.num_cpu_chunks,
        )
        self.live: dict[str, tuple[Any, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.idle_steps = 0

    def add(self, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        request = self.engine.add(prompt, max_tokens, salt)
        job = self.replica.submit(self.replica.text(prompt, salt), max_tokens)
        self.live[request.request_id] = request, job
        self.counts["requests"] += 1

    def abort(self, name: str) -> None:
        request, job = self.live.pop(name)
        self.engine.abort(request)
        self.replica.abort(job)
        self.counts["aborted"] += 1

    def step(self, where: str) -> None:
        computed = self.engine.step()
        step = self.replica.begin_step()
        assert [id(job) for job in step.jobs] == [id(self.live[name][1]) for name in computed], where
        self.replica.end_step(step, self.engine.ended)
        for name, (request, job) in list(self.live.items()):
            assert (job.finished, job.preemptions) == (request.is_finished(), request.num_preemptions), where
            assert job.text.num_tokens == request.num_tokens, where
            if not job.finished:
                assert job.computed == request.num_computed_tokens, where
                continue
            assert job.cached == self.engine.reused[name], where
            del self.live[name]
            self.counts["preempted"] += job.preemptions
            self.counts["hits"] += (job.reused or 0) > 0
            self.counts["loaded"] += job.loaded > 0
        wanted = [sorted_arrivals([tuplify(event, self.geometry) for event in batch]) for batch in self.engine.batches]
        assert [sorted_arrivals(batch) for batch in self.told] == wanted, where
        self.counts["steps"] += 1
        self.counts["several"] += len(computed) > 1
        self.idle_steps = 0 if computed or self.engine.ended else self.idle_steps + 1
        count_events(self.counts, self.told)
        self.told.clear()
        self.engine.batches.clear()


def sorted_arrivals(batch: Batch) -> Batch:
    """Sort the arrivals that follow one another, because vLLM iterates over a set when a store has ended."""
    ordered: Batch = []
    for _, run in itertools.groupby(batch, key=lambda event: isinstance(event, OffloadedChunk)):
        ordered += sorted(run, key=lambda event: (event.key,) if isinstance(event, OffloadedChunk) else ())
    return ordered


def run_twins(twins: Twins, rng: random.Random, count: int, seed: str, *, aborts: bool = True) -> None:
    """Submit and abort requests at random until all are done."""
    to_come = requests(rng, count)
    more = True
    while more or twins.live:
        while more and len(twins.live) < MAX_RUNNING + 2 and rng.random() < 0.5:
            arrival = next(to_come, None)
            if arrival is None:
                more = False
                break
            twins.add(*arrival)
        if aborts and twins.live and rng.random() < 0.01:
            twins.abort(rng.choice(list(twins.live)))
        twins.step(f"{seed}, step {twins.counts['steps']}, {twins.counts['requests']} requests")
        if twins.idle_steps > STUCK_STEPS and twins.live:
            twins.abort(next(iter(twins.live)))
            twins.idle_steps = 0


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_several_requests_at_once(name: str, keep: int | str | None, tmp_path: Path) -> None:
    """Compare each step: the computed requests, their order and progress, the preemptions, and the step's batch."""
    geometry = geometry_of(name, keep)
    seed = f"at once {name} {keep}"
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for chunk_tokens, spare_blocks in ((72, 3), (200, 12)):
        blocks = fewest_blocks(geometry, LONGEST_TOKENS, chunk_tokens) + spare_blocks
        twins = Twins(geometry, blocks, chunk_tokens, tmp_path / str(chunk_tokens))
        run_twins(twins, rng, 60, seed)
        assert twins.replica.pool.num_free == blocks - 1
        counts += twins.counts
    print(f"\n{seed}: {dict(counts)}")
    assert counts["several"] > 100
    assert counts["removed"]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_with_a_cpu_tier(name: str, keep: int | str | None, tmp_path: Path) -> None:
    """Compare the same with vLLM's OffloadingConnector: stores, loads, evictions, and requests that wait for them."""
    geometry = geometry_of(name, keep)
    seed = f"cpu {name} {keep}"
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for chunk_tokens, spare_blocks, prompts in ((72, 3, 1.5), (200, 12, 6)):
        blocks = 2 * fewest_blocks(geometry, LONGEST_TOKENS, chunk_tokens) + spare_blocks
        # The tier holds that many of the longest prompts.
        cpu_chunks = int(prompts * fewest_blocks(geometry, LONGEST_TOKENS, LONGEST_TOKENS))
        twins = Twins(geometry, blocks, chunk_tokens, tmp_path / str(chunk_tokens), cpu_chunks)
        # A dense tail that an abort moves is not simulated.
        run_twins(twins, rng, 60, seed, aborts=keep is not None)
        counts += twins.counts
    print(f"\n{seed}: {dict(counts)}")
    assert counts["offloaded"]
    # Windows and chunks alone are mostly still on the GPU, and a window of one token keeps no block at all.
    assert counts["loaded"] or "only" in name or name == "gpt-oss window of one token"
