# SPDX-License-Identifier: Apache-2.0
"""Virtual time: steps last as long as the timing says, in order, and the same run twice is the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvrouter.simulator.cache.shapes import Geometry, gpt_oss, llama, qwen3_next
from kvrouter.simulator.cache.text import PieceText
from kvrouter.simulator.engine.replica import Replica
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.virtual_time import Moment, ReplicaFleet, VirtualReplica

# A step takes 10 ms, a prefilled token 1 ms, and a decoding request 2 ms.
TIMING = Timing(prefill_tokens_per_s=1000, step_base_s=0.010, decode_sequence_s=0.002)


def fleet(
    replicas: int = 1, geometry: Geometry | None = None, *, blocks: int = 100, chunk_tokens: int = 64, **more: float
) -> ReplicaFleet:
    shape = geometry or llama(16)
    return ReplicaFleet(
        [
            VirtualReplica(Replica(shape, blocks, on_step=lambda _: None, chunk_tokens=chunk_tokens), TIMING, **more)
            for _ in range(replicas)
        ]
    )


def prompt(first_piece: int, tokens: int, number: int = 0) -> PieceText:
    ids = range(first_piece, first_piece + -(-tokens // 32))
    return PieceText(ids, tokens, piece_tokens=32, hash_block_size=16, number=number)


def told(moments: list[Moment]) -> list[tuple[float, str]]:
    return [(round(moment.time_s, 6), moment.kind) for moment in moments]


def test_a_prompt_takes_its_prefill_and_a_token_its_step() -> None:
    sim = fleet()
    sim.submit(0, prompt(0, 100), 3, now_s=5.0)
    # The chunks have 64 and 36 tokens and take 74 and 46 ms; then two steps take 12 ms each.
    assert told(list(sim.advance())) == [(5.12, "first_token"), (5.144, "done")]


def test_the_clock_advances_no_further_than_requested() -> None:
    sim = fleet()
    sim.submit(0, prompt(0, 100), 3, now_s=0.0)
    assert told(list(sim.advance(0.1201))) == [(0.12, "first_token")]
    assert list(sim.advance(0.1439)) == []
    assert told(list(sim.advance(0.1441))) == [(0.144, "done")]
    assert sim.replicas[0].next_s is None


def test_a_request_joins_at_the_next_step() -> None:
    sim = fleet()
    sim.submit(0, prompt(0, 50), 2, now_s=0.0)
    sim.submit(0, prompt(100, 20), 1, now_s=0.03)
    # The first step takes 60 ms; the next one, with one decode and 20 prefill tokens, takes 32 ms.
    moments = list(sim.advance())
    assert told(moments) == [(0.06, "first_token"), (0.092, "first_token"), (0.092, "done"), (0.092, "done")]
    assert moments[1].job is not moments[0].job


def test_cached_tokens_take_no_time() -> None:
    sim = fleet()
    sim.submit(0, prompt(0, 65), 1, now_s=0.0)
    list(sim.advance())
    job = sim.submit(0, prompt(0, 65, number=1), 1, now_s=1.0)
    assert told(list(sim.advance())) == [(1.011, "first_token"), (1.011, "done")]
    assert job.reused == 64


def test_replicas_go_their_own_way_in_one_order() -> None:
    sim = fleet(2)
    sim.replicas[1].slowdown = 3.0
    sim.submit(1, prompt(0, 10), 1, now_s=0.0)
    sim.submit(0, prompt(0, 10), 2, now_s=0.0)
    moments = list(sim.advance())
    assert [(m.replica, round(m.time_s, 6), m.kind) for m in moments] == [
        (0, 0.02, "first_token"),
        (0, 0.032, "done"),
        (1, 0.06, "first_token"),
        (1, 0.06, "done"),
    ]


def test_more_may_be_submitted_between_two_moments() -> None:
    sim = fleet()
    sim.submit(0, prompt(0, 10), 1, now_s=0.0)
    times_s = []
    for moment in sim.advance():
        times_s.append(round(moment.time_s, 6))
        if moment.kind == "done" and len(times_s) < 5:
            sim.submit(0, prompt(200, 10), 1, moment.time_s)
    assert times_s == [0.02, 0.02, 0.04, 0.04, 0.06, 0.06]


def test_no_more_than_the_pool_holds_and_all_come_to_their_end() -> None:
    sim = fleet(geometry=gpt_oss(16, 32), blocks=30)
    jobs = [sim.submit(0, prompt(n * 10, 150, number=n), 60, now_s=n * 0.01) for n in range(12)]
    finished = [moment.job for moment in sim.advance() if moment.kind == "done"]
    assert len(finished) == len(jobs) and all(job.finished for job in jobs)
    assert sum(job.preemptions for job in jobs) > 0
    assert sim.replicas[0].replica.pool.num_free == 29


@pytest.mark.parametrize(("geometry", "blocks"), [(llama(16), 60), (gpt_oss(16, 32), 90), (qwen3_next(32), 120)])
def test_quiet_steps_taken_together_are_those_taken_one_by_one(geometry: Geometry, blocks: int) -> None:
    def run(together: bool) -> tuple[list[tuple[float, int, str]], list[object], int]:
        rng, events, skipped = random.Random(7), list[object](), 0
        replica = Replica(geometry, blocks, on_step=events.extend, chunk_tokens=64)
        sim = ReplicaFleet([VirtualReplica(replica, TIMING)])
        skip = replica.scheduler.skip

        def counted(steps: int) -> None:
            nonlocal skipped
            skipped += steps
            skip(steps)

        replica.scheduler.skip = counted  # type: ignore[method-assign]
        if not together:
            replica.scheduler.quiet_steps = lambda: 0  # type: ignore[method-assign]
        numbers: dict[Any, int] = {}
        moments: list[tuple[float, int, str]] = []
        now_s = 0.0
        for number in range(60):
            now_s += rng.expovariate(2.0)
            for moment in sim.advance(now_s):
                moments.append((moment.time_s, numbers[moment.job], moment.kind))
            ids = range((first := 10 * rng.randrange(5)), first + 5)
            text = PieceText(
                ids, rng.randrange(1, 150), piece_tokens=32, hash_block_size=geometry.hash_block_size, number=number
            )
            numbers[sim.submit(0, text, rng.randrange(1, 120), now_s)] = number
        moments += [(moment.time_s, numbers[moment.job], moment.kind) for moment in sim.advance()]
        return moments, events, skipped

    moments, events, skipped = run(together=True)
    assert (moments, events, 0) == run(together=False)
    assert skipped > 1000 and len(moments) == 120


def test_only_equal_pieces_have_equal_hashes() -> None:
    first = PieceText([1, 2, 3], 90, piece_tokens=32, hash_block_size=16, number=1)
    second = PieceText([1, 2, 4], 90, piece_tokens=32, hash_block_size=16, number=2)
    assert (len(first.hashes), first.hashes[:4]) == (5, second.hashes[:4])
    assert first.hashes[4] != second.hashes[4]
    for text in (first, second):
        for _ in range(10):
            text.grow()
    assert first.hashes[5] != second.hashes[5]
    numbers = PieceText.hash_numbers([1, 2, 3], 90, 32, 16)
    assert [int(number).to_bytes(8, "big") for number in numbers] == first.hashes[:5]
    assert len(set(first.hashes + second.hashes)) == 8


@pytest.mark.parametrize(("pieces", "tokens", "block"), [([1], 33, 16), ([1], 10, 12)])
def test_pieces_that_do_not_fit_are_refused(pieces: list[int], tokens: int, block: int) -> None:
    with pytest.raises(ValueError, match="pieces"):
        PieceText(pieces, tokens, piece_tokens=32, hash_block_size=block, number=0)


def test_times_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Timing(prefill_tokens_per_s=0)
    with pytest.raises(ValueError, match="not below"):
        Timing(step_base_s=-1)
