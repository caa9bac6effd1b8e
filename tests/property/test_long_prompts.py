# SPDX-License-Identifier: Apache-2.0
"""A long prompt that is hashed in turns gets the same hits as one hashed at once, whatever changes between the turns.

Other requests are answered between the turns.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.app.core.hit_finder import HitFinder
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import LONG_PROMPT_TOKENS, Hit, Question
from kvrouter.router.index.matching.routing_history import RoutingHistory
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_chain
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SEGMENT_BLOCKS, SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.examples import examples

BLOCK_TOKENS = 2
SEGMENTS = 5
BLOCKS = SEGMENTS * SEGMENT_BLOCKS
SCHEME = HashScheme.default()
TOKENS = np.random.default_rng(1).integers(0, 50_000, BLOCKS * BLOCK_TOKENS + 1)
FULL, WINDOW = Group(0, "full_attention", BLOCK_TOKENS), Group(1, "sliding_window", BLOCK_TOKENS, sliding_window=9)
WORKERS = [WorkerKey("m", "a"), WorkerKey("m", "b")]
PATHS = {"adapter": "/path"}


class Fleet:
    """Two workers of one hash space."""

    def __init__(self, groups: tuple[Group, ...], *, other_path: bool) -> None:
        self.mirror = Mirror(1 << 26)
        self.groups = groups
        catalog = build_catalog(groups, "configured", CatalogSpec())
        paths = [PATHS, {"adapter": "/other"} if other_path else PATHS]
        for worker in WORKERS:
            self.mirror.begin_epoch(worker, "e")
        self.views = [
            WorkerView(worker, None, StreamState.LIVE, True, "", "e", catalog, SCHEME, path)
            for worker, path in zip(WORKERS, paths, strict=True)
        ]

    def hold(self, number: int, blocks: int, lora: str | None) -> None:
        """Add the prompt's first blocks to a worker, in all its groups."""
        path = self.views[number].lora_paths["adapter"]
        key = None if lora is None else (("lora", lora, path),)
        hashes, _ = hash_chain(SCHEME, None, TOKENS[: blocks * BLOCK_TOKENS], BLOCK_TOKENS, (key,))
        for group in self.groups:
            self.mirror.add(WORKERS[number], Place(group.group_idx or 0, GPU), hashes)

    def hits(self, question: Question, matcher: Matcher) -> list[Hit]:
        return sorted(matcher.match(question, self.plans()), key=lambda hit: hit.worker)

    def plans(self) -> HashPlans:
        return HashPlans.build(self.mirror, self.views)


@settings(max_examples=examples(100), deadline=None)
@given(
    before=st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)),
    after=st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS)),
    steps=st.integers(0, 2 * SEGMENTS),
    windows_only=st.booleans(),
    lora=st.sampled_from([None, "adapter"]),
    other_path=st.booleans(),
    explain=st.booleans(),
)
def test_hits_are_those_of_a_prompt_that_was_hashed_at_once(
    before: tuple[int, int],
    after: tuple[int, int],
    steps: int,
    windows_only: bool,
    lora: str | None,
    other_path: bool,
    explain: bool,
) -> None:
    fleet = Fleet((WINDOW,) if windows_only else (FULL, WINDOW), other_path=other_path)
    for number, blocks in enumerate(before):
        fleet.hold(number, blocks, lora)
    question = Question("m", len(TOKENS), token_ids=TOKENS, lora_name=lora, explain=explain)
    ahead = Matcher(fleet.mirror, SegmentMemory(0))
    for _, _ in zip(range(steps), ahead.hash_steps(question, fleet.plans()), strict=False):
        pass
    for number, blocks in enumerate(after):
        fleet.hold(number, blocks, lora)
    fresh = msgspec.structs.replace(question, hashers={})
    assert fleet.hits(question, ahead) == fleet.hits(fresh, Matcher(fleet.mirror, SegmentMemory(0)))


def test_a_match_after_the_turns_hashes_no_more_than_its_last_segment() -> None:
    fleet = Fleet((FULL, WINDOW), other_path=False)
    fleet.hold(0, BLOCKS, None)
    memory = SegmentMemory(0)
    matcher = Matcher(fleet.mirror, memory)
    question = Question("m", len(TOKENS), token_ids=TOKENS)
    assert sum(1 for _ in matcher.hash_steps(question, fleet.plans())) == SEGMENTS
    hashed = memory.misses
    assert hashed == SEGMENTS
    assert fleet.hits(question, matcher)[0].on_gpu == BLOCKS * BLOCK_TOKENS
    assert memory.misses == hashed


class Seconds:
    """A clock that advances by a millisecond at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.mark.parametrize(("num_tokens", "least_turns"), [(4 * LONG_PROMPT_TOKENS, 300), (LONG_PROMPT_TOKENS - 1, 0)])
def test_others_run_between_the_turns_of_a_long_prompt(
    num_tokens: int, least_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet((FULL,), other_path=False)
    ids = np.arange(num_tokens) % 50_000
    hashes, _ = hash_chain(SCHEME, None, ids, BLOCK_TOKENS, (None,))
    fleet.mirror.add(WORKERS[0], Place(0, GPU), hashes)
    finder = HitFinder(
        WorkerRegistry(),
        fleet.mirror,
        SegmentMemory(0),
        RoutingHistory(1.0),
        adapters=dict,
        clock=Seconds(),
    )
    plans = fleet.plans()
    monkeypatch.setattr(finder, "plans", lambda model: plans)
    question = Question("m", num_tokens, token_ids=ids)

    async def turns() -> int:
        hashing = asyncio.ensure_future(finder.hash_ahead(question))
        count = 0
        while not hashing.done():
            await asyncio.sleep(0)
            count += 1
        await hashing
        return count

    assert asyncio.run(turns()) >= max(1, least_turns)
    assert bool(question.hashers) == (least_turns > 0)
