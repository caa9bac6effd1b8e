# SPDX-License-Identifier: Apache-2.0
"""Requests with pulls that end in any order and in any way: what sources lend is never negative, and zero at the end."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
from hypothesis import given, settings

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.placement_request import Placement
from tests.support.examples import examples
from tests.support.placing_stage import Stage, ask, hit

TOKENS, PULLED = 8_192, 7_936
SOURCES, READERS = ("w0", "w1"), ("a", "b", "c", "p")


def stage() -> Stage:
    pulls = tuple(Pull(WorkerKey("m", source), PULLED) for source in SOURCES)
    readers = [Hit(WorkerKey("m", name), all_on_gpu(0), "live", pulls=pulls) for name in READERS]
    made = Stage(*[hit(source, PULLED) for source in SOURCES], *readers, saturation_tokens=2**40)
    made.fleet.peers = {
        name: PeerAddress(f"host-{name}", 7_000, "same", token_bytes=16_384) for name in (*SOURCES, *READERS)
    }
    return made


def step(on: Stage, placements: list[Placement], rng: Random) -> None:
    """Do one thing that may happen to a fleet."""
    kind = rng.randrange(10)
    if kind < 4 or not placements:
        excluded = frozenset(SOURCES) if rng.random() < 0.8 else frozenset()
        placements.append(on.placer.reserve(ask(rng.randrange(3), TOKENS, exclude_worker_ids=excluded)))
        return
    placement = rng.choice(placements)
    if kind == 4:
        placement.first_token()
    elif kind == 5:
        placement.done(rng.choice([None, 100]))
    elif kind == 6:
        served = rng.choice(READERS[:3])
        placement.served_by(next(known for known in on.fleet.known if known.worker.worker_id == served))
        assert placement.pull is None or not placement.has_moved
    elif kind == 7:
        if rng.random() < 0.5:
            placement.handed_over()
        else:
            placement.prefill_failed(None)
    elif kind == 8:
        placement.reused(rng.choice([0, 1_000, PULLED]))
    else:
        on.now += rng.choice([0.1, 30.0, 400.0])
        on.placer.tick()


@given(st.randoms(use_true_random=False), st.integers(1, 60))
@settings(max_examples=examples(60))
def test_what_sources_lend_returns_to_zero_whatever_happens(rng: Random, steps: int) -> None:
    on, placements = stage(), list[Placement]()
    table = on.placer.weights.table
    for _ in range(steps):
        step(on, placements, rng)
        lent = [load.lent_tokens for load in table.loads.values()]
        assert all(tokens >= 0 for tokens in lent)
        # A worker that serves in place of the chosen one fetches from the same source.
        running = [placement for placement in placements if placement.pull is not None or placement.has_moved]
        assert sum(lent) <= PULLED * len(running)
    for placement in placements:
        placement.done()
    assert not table.loads and not table.own()
