# SPDX-License-Identifier: Apache-2.0
"""Continuous batching, by cases small enough to follow by hand; vLLM's own scheduler judges the rest (tests/engine)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.cache.shapes import SHAPES, Geometry, gpt_oss, llama, make_geometry, qwen3_next
from kvrouter.simulator.engine.replica import Replica, RequestRefused
from kvrouter.simulator.engine.scheduler import Step


def replica(
    blocks: int = 100, *, chunk_tokens: int = 32, max_running: int = 8, shape: Geometry | None = None
) -> Replica:
    geometry = llama(16) if shape is None else shape
    return Replica(geometry, blocks, on_step=lambda _: None, chunk_tokens=chunk_tokens, max_running=max_running)


def submit(sim: Replica, start: int, tokens: int, max_tokens: int = 4) -> Job:
    return sim.submit(sim.text(list(range(start, start + tokens))), max_tokens)


def step(sim: Replica) -> Step:
    next_step = sim.begin_step()
    sim.end_step(next_step)
    return next_step


def test_one_budget_for_all_and_running_requests_first() -> None:
    sim = replica()
    first = submit(sim, 0, 40)
    second = submit(sim, 100, 40)
    assert step(sim).jobs == [first]
    assert first.computed == 32
    # The step computes 8 tokens of the first request, and then 24 of the second.
    assert step(sim).jobs == [first, second]
    assert (first.computed, second.computed) == (40, 24)
    latest = step(sim)
    assert (latest.jobs, latest.decodes, latest.prefill_tokens) == ([first, second], 1, 16)


def test_the_number_of_running_requests_is_bounded() -> None:
    sim = replica(max_running=2)
    jobs = [submit(sim, 100 * n, 5, 2) for n in range(3)]
    assert step(sim).jobs == jobs[:2]
    assert step(sim).finished == jobs[:2]
    assert step(sim).jobs == jobs[2:]


def test_no_request_overtakes_one_that_does_not_fit() -> None:
    sim = replica(8, chunk_tokens=200)
    running = submit(sim, 0, 80, 3)
    large, small = submit(sim, 100, 60), submit(sim, 200, 5)
    assert step(sim).jobs == [running]
    assert list(sim.scheduler.waiting) == [large, small]
    step(sim)
    assert step(sim).finished == [running]
    assert step(sim).jobs == [large, small]


def test_the_last_one_admitted_makes_room_and_comes_back_first() -> None:
    sim = replica(5, chunk_tokens=100)
    old, young, waiting = submit(sim, 0, 31, 30), submit(sim, 100, 31, 30), submit(sim, 200, 31, 1)
    while not young.preemptions:
        step(sim)
    assert list(sim.scheduler.waiting) == [young, waiting]
    assert sim.scheduler.running == [old]
    while not waiting.finished:
        step(sim)
    assert old.finished and young.finished
    assert (old.sampled, young.sampled) == (30, 30)
    assert (sim.scheduler.preemptions, sim.pool.num_free) == (young.preemptions, 4)


def test_the_last_one_admitted_makes_room_for_nobody_by_going_itself() -> None:
    sim = replica(5, chunk_tokens=100)
    old, young = submit(sim, 0, 17, 12), submit(sim, 100, 31, 12)
    step(sim)
    step(sim)
    assert step(sim).jobs == [old]
    assert (old.preemptions, young.preemptions, young.computed) == (0, 1, 0)
    while sim.busy:
        step(sim)
    assert (old.sampled, young.sampled) == (12, 12)


def test_a_preempted_request_says_what_it_reused_at_first() -> None:
    sim = replica(5, chunk_tokens=100)
    submit(sim, 0, 31, 30)
    young = submit(sim, 100, 31, 30)
    while not young.finished:
        step(sim)
    assert young.preemptions and young.reused == 0
    assert sim.scheduler.queried_tokens == 62


def test_an_abort_frees_at_once() -> None:
    sim = replica()
    running, waiting = submit(sim, 0, 100), submit(sim, 200, 20)
    step(sim)
    sim.abort(running)
    sim.abort(waiting)
    sim.abort(waiting)
    assert sim.pool.num_free == 99
    assert not sim.busy


def test_a_sibling_waits_a_step_for_a_state_that_is_being_written() -> None:
    sim = replica(chunk_tokens=200, shape=qwen3_next(16, 1))
    first = submit(sim, 0, 60)
    second = submit(sim, 0, 60)
    # The first request ends its chunk at its last boundary, 48, and vLLM registers that state once more with the rest.
    assert step(sim).jobs == [first]
    assert step(sim).jobs == [first]
    assert step(sim).jobs == [first, second]
    assert second.reused == 48


def test_attention_blocks_of_the_same_step_may_be_shared() -> None:
    sim = replica(chunk_tokens=200)
    first, second = submit(sim, 0, 60), submit(sim, 0, 60)
    assert step(sim).jobs == [first, second]
    assert (first.reused, second.reused) == (0, 48)


@pytest.mark.parametrize("name", SHAPES)
def test_all_requests_end_and_leave_nothing_behind(name: str) -> None:
    geometry = make_geometry(name, block_size=64 if name == "deepseek-v4" else 16)
    rng = random.Random(name)
    sim = replica(1500, chunk_tokens=100, max_running=4, shape=geometry)
    jobs = [submit(sim, rng.choice([0, 1000]), rng.randint(1, 400), rng.randint(1, 80)) for _ in range(30)]
    for job in rng.sample(jobs, 3):
        step(sim)
        sim.abort(job)
    while sim.busy:
        step(sim)
    assert all(job.finished and (job.aborted or job.sampled == job.max_tokens) for job in jobs)
    assert sim.pool.num_free == 1499


def test_a_context_is_not_exceeded() -> None:
    sim = Replica(gpt_oss(), 100, on_step=lambda _: None, max_text_tokens=50)
    with pytest.raises(RequestRefused, match="context of 50"):
        submit(sim, 0, 48, 3)
    submit(sim, 0, 48, 2)


@pytest.mark.parametrize("sizes", [{"chunk_tokens": 0}, {"max_running": 0}])
def test_sizes_below_one_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|at a time"):
        replica(**sizes)
