# SPDX-License-Identifier: Apache-2.0
"""Claim: the steps of a reservation's life take little CPU time beside the reading of its prompt.

    python -m benchmarks.reservation_time [--rounds N] [--workers N]

The hits of every worker are given, so the times are those of the placer alone: a reservation (the names of the prompt's
beginnings, pending credit, choice, load), the end of its prefill, and its release. All prompts have 8,192 token ids, and
the last 256 of each are new, as in `benchmarks/peers/selection.py`. Each step runs for all prompts of a round before
the next step does, so reservations are under way together. The result is the CPU time of one call in the fastest
round, in us, because other processes use the machine too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.choice_time import PartlyFilledFleet, loaded_placer
from benchmarks.report import parser_of, print_setting
from kvrouter.router.index.matching.question import Question
from kvrouter.router.route.load.load_messages import PREFILL_COMPLETE, RELEASE
from kvrouter.router.route.placement.placement_request import PlacementRequest

TOKENS, NEW_TOKENS, VOCABULARY = 8_192, 256, 128_256
BASES, PROMPTS = 64, 64


def cpu_us(call: Callable[..., object], arguments: Iterable[object]) -> float:
    """Return the CPU time of one call, in us, as the mean over all arguments."""
    start, calls = time.process_time_ns(), 0
    for argument in arguments:
        call(argument)
        calls += 1
    return (time.process_time_ns() - start) / calls / 1_000


def measure(workers: int, rounds: int) -> list[float]:
    """Return the least CPU time of each step: reserve, end the prefill, release."""
    fleet = PartlyFilledFleet(workers)
    placer = loaded_placer(fleet, fleet.keys)
    rng = np.random.default_rng(1)
    bases = rng.integers(0, VOCABULARY, (BASES, TOKENS))
    least_us = [float("inf")] * 3
    for turn in range(rounds):
        requests = []
        for number in range(PROMPTS):
            ids = bases[number % BASES].copy()
            ids[-NEW_TOKENS:] = rng.integers(0, VOCABULARY, NEW_TOKENS)
            question = Question("m", TOKENS, token_ids=ids)
            requests.append(PlacementRequest(question, selection_id=f"s{turn}-{number}"))
        names = [request.selection_id for request in requests]
        taken_us = [
            cpu_us(placer.reserve, requests),
            cpu_us(lambda name: placer.end_here(name, PREFILL_COMPLETE), names),
            cpu_us(lambda name: placer.end_here(name, RELEASE), names),
        ]
        placer.tick()
        placer.traffic.take_prompts()
        least_us = list(map(min, least_us, taken_us))
    return least_us


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--workers", type=int, default=16)
    arguments = parser.parse_args()
    # Disable collections, as in `choice_time.py`.
    gc.disable()
    print_setting()
    print("| workers | reserve, us | prefill complete, us | release, us | life, us |\n|---|---|---|---|---|")
    least_us = measure(arguments.workers, arguments.rounds)
    print("|", " | ".join([str(arguments.workers), *(f"{us:.1f}" for us in (*least_us, sum(least_us)))]), "|")


if __name__ == "__main__":
    main()
