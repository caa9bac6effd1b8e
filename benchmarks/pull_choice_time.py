# SPDX-License-Identifier: Apache-2.0
"""Claim: choosing among workers and sources costs at most 1.3 times as much as choosing among workers.

    python -m benchmarks.pull_choice_time [--rounds N] [--sources N]

As in `choice_time`, the hits of every worker are given. They are those of one prompt, of which every fourth worker holds
a part; in the rows with sources, each worker that holds less than the longest lists the same few sources, and all of
them are priced, as all bring equally much. The two kinds of rounds alternate, so that other processes of the machine
disturb both alike; a result is the processor time of the fastest of all rounds, in us.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import msgspec

from benchmarks.choice_time import CALLS, NUM_TOKENS, WORKERS, PartlyFilledFleet, loaded_placer
from benchmarks.report import parser_of, print_setting
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.route.placement.choose import choose
from kvrouter.router.route.placement.copies import Copies
from kvrouter.router.route.placement.cost import ChoiceContext
from kvrouter.router.route.placement.lenders import Lenders
from kvrouter.router.route.placement.placement_request import PlacementRequest

GOAL = 1.3


class LendingFleet(PartlyFilledFleet):
    """Workers that lend, eight on each host; those that hold less than the longest may fetch from a few sources."""

    def __init__(self, workers: int, sources: int) -> None:
        super().__init__(workers)
        self.addresses = {
            key: PeerAddress(f"host-{number // 8}", 7_000 + number, "same", token_bytes=65_536)
            for number, key in enumerate(self.keys)
        }
        longest = max(hit.tokens for hit in self.known)
        lenders = self.keys[-sources:] if sources else []
        self.known = [
            msgspec.structs.replace(
                hit, pulls=tuple(Pull(source, longest) for source in lenders if source != hit.worker)
            )
            if hit.tokens < longest
            else hit
            for hit in self.known
        ]

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        return self.addresses.get(worker)


def steps(workers: int, sources: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a choice alone, and a whole reservation with its release."""
    fleet = LendingFleet(workers, sources)
    placer = loaded_placer(fleet, fleet.keys)
    copies = Copies([128.0 * piece for piece in range(NUM_TOKENS // 256)], 256)
    lenders = Lenders(fleet, placer.weights, lambda worker: None)
    context = ChoiceContext(NUM_TOKENS, placer.weights, writes=fleet.writes("m"), copies=copies, lenders=lenders)
    rng, request = random.Random(2), PlacementRequest(fleet.question)
    return lambda: choose(fleet.known, context, rng), lambda: placer.reserve(request).done()


def round_us(call: Callable[[], object]) -> float:
    """Return the time of one call in a round, in us."""
    start = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - start) / CALLS * 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sources", type=int, default=2, help="sources of each worker")
    arguments = parser.parse_args()
    # As in `choice_time`: in service, the router's long-lived objects are not walked either.
    gc.disable()
    print_setting()
    print("| workers | step | without, us | with sources, us | ratio | at most 1.3 |\n|---|---|---|---|---|---|")
    for workers in WORKERS:
        plain, pulling = steps(workers, 0), steps(workers, arguments.sources)
        for name, without, with_sources in zip(("choose", "reserve and release"), plain, pulling, strict=True):
            rounds = [(round_us(without), round_us(with_sources)) for _ in range(arguments.rounds)]
            without_us, with_us = (min(times) for times in zip(*rounds, strict=True))
            ratio = with_us / without_us
            met = "yes" if ratio <= GOAL else "no"
            print(f"| {workers} | {name} | {without_us:.1f} | {with_us:.1f} | {ratio:.2f} | {met} |", flush=True)


if __name__ == "__main__":
    main()
