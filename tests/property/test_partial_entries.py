# SPDX-License-Identifier: Apache-2.0
"""A hybrid of full attention and Mamba whose hashes are finer than its blocks, learned from any point of its stream.

The engine announces whole blocks, and single entries inside blocks whose parent nobody announced. Whatever was lost, and
whenever another router takes over, no hit is longer than with the declared catalog, and none is shorter once a first
block has shown the sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.stream_items import GapLost, GapOpened, Proven
from kvrouter.events.vllm.wire import WireRemoved, WireStored
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_chain
from kvrouter.router.model.kvcache.catalog import Catalog, Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.ingest_steps import batch, feed, live, removed, restored, stored

BLOCK, UNIT = 528, 16
FULL, MAMBA = "full_attention", "mamba"
KINDS = (FULL, MAMBA)
# Three prompts with one beginning, of up to four blocks.
PROMPTS = 3
SHARED_TOKENS = BLOCK + 5 * UNIT
MAX_TOKENS = 4 * BLOCK + 7
SCHEME = HashScheme.default()
DECLARED = build_catalog(
    [Group(number, kind, BLOCK) for number, kind in enumerate(KINDS)], "declared", CatalogSpec(hash_block_size=UNIT)
)


@cache
def tokens_of(prompt: int) -> tuple[int, ...]:
    return (*range(SHARED_TOKENS), *range(10_000 * (prompt + 1), 10_000 * (prompt + 1) + MAX_TOKENS - SHARED_TOKENS))


@cache
def chain_of(prompt: int) -> list[int]:
    hashes, _ = hash_chain(SCHEME, None, np.array(tokens_of(prompt)), UNIT, (None,))
    return [int(block_hash) for block_hash in hashes]


def hash_at(prompt: int, tokens: int) -> int | None:
    return chain_of(prompt)[tokens // UNIT - 1] if tokens else None


class Engine:
    """The announcements of an engine for its prompts. A hash has one copy in a group."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.held: list[set[int]] = [set() for _ in KINDS]

    def _store(self, group: int, prompt: int, first: int, last: int, size: int) -> Iterator[WireStored]:
        """Announce the blocks of `size` tokens from `first` to `last`, if the group lacks the last one."""
        ends = range(first + size, last + 1, size)
        hashes = [hash_at(prompt, end) or 0 for end in ends]
        if hashes and group and size == BLOCK:
            # Mamba keeps the state at the end of the last block alone.
            hashes, first = hashes[-1:], ends[-1] - size
        if not hashes or hashes[-1] in self.held[group]:
            return
        self.held[group].update(hashes)
        yield stored(
            hashes, group, parent_block_hash=hash_at(prompt, first), block_size=size, kv_cache_spec_kind=KINDS[group],
            token_ids=list(tokens_of(prompt)[first : first + len(hashes) * size]), extra_keys=[None] * len(hashes),
        )  # fmt: skip

    def compute(self, prompt: int, num_tokens: int) -> list[Any]:
        """Announce a prompt's new whole blocks, and the entry at its last boundary if that lies inside a block."""
        whole = num_tokens // BLOCK * BLOCK
        boundary = (num_tokens - 1) // UNIT * UNIT
        events: list[Any] = []
        for group in range(len(KINDS)):
            known = [end for end in range(BLOCK, whole + 1, BLOCK) if hash_at(prompt, end) in self.held[0]]
            events += self._store(group, prompt, 0 if group else max(known, default=0), whole, BLOCK)
            if boundary % BLOCK:
                events += self._store(group, prompt, boundary - UNIT, boundary, UNIT)
        return events

    def truth(self) -> Held:
        return {Place(group, GPU): np.array(sorted(held), np.uint64) for group, held in enumerate(self.held)}

    def evict(self) -> list[WireRemoved]:
        group = self._rng.randrange(len(KINDS))
        if not self.held[group]:
            return []
        block_hash = self._rng.choice(sorted(self.held[group]))
        self.held[group].remove(block_hash)
        return [removed([block_hash], group)]


Held = Mapping[Place, NDArray[np.uint64]]


def known(ingest: Ingest) -> Held:
    return {place: ingest.held.blocks.hashes(place) for place in ingest.held.blocks.places}


def hit(held: Held, catalog: Catalog, prompt: int, num_tokens: int) -> int:
    """Return the tokens of a prompt that this catalog finds in these blocks."""
    mirror, worker = Mirror(1 << 24), WorkerKey("m", "w")
    mirror.begin_epoch(worker, "e")
    for place, hashes in held.items():
        mirror.add(worker, place, hashes)
    view = WorkerView(worker, None, StreamState.LIVE, True, "", "e", catalog, SCHEME, {})
    question = Question("m", num_tokens, token_ids=np.array(tokens_of(prompt)[:num_tokens]))
    (found,) = Matcher(mirror, SegmentMemory(0)).match(question, HashPlans.build(mirror, [view]))
    return found.on_gpu


def lose(ingest: Ingest, seq: int) -> None:
    """Have a batch before `seq` lost for good."""
    feed(ingest, GapOpened(seq - 1, seq), GapLost(seq - 1, seq, "the ring is shorter"), CaughtUp())


def take_over(ingest: Ingest, seq: int) -> Ingest:
    """Return the ingest of another router, which reads on after batch `seq - 1`."""
    again = restored(ingest, seq - 1, dict(known(ingest)))
    return feed(again, FellBehind(), Proven(seq - 1, "replay"), CaughtUp())


@pytest.mark.parametrize("seed", range(40))
def test_entries_inside_blocks_are_never_credited_too_much_and_exactly_once_a_block_was_named(seed: int) -> None:
    rng = random.Random(seed)
    engine, ingest, seq = Engine(rng), live(), 0
    if rng.random() < 0.5:
        # The router comes later than the engine.
        for _ in range(rng.randrange(1, 6)):
            engine.compute(rng.randrange(PROMPTS), rng.randrange(2, MAX_TOKENS))
            seq += 1
    named: set[int | None] = set()
    is_whole = not seq
    for _ in range(30):
        step = rng.random()
        if step < 0.08 and seq:
            lose(ingest, seq + 1)
            seq += 1
            named.clear()
            is_whole = False
        elif step < 0.16 and ingest.held.has_news:
            ingest = take_over(ingest, seq)
            # The other router has not read the first batch, so it learns no size from entries alone.
            is_whole &= any(group.kind == FULL and group.block_size > UNIT for group in ingest.profile.catalog.groups)
        elif step < 0.4:
            feed(ingest, batch(seq, *engine.evict()))
            seq += 1
        else:
            short = rng.random() < 0.6
            events = engine.compute(rng.randrange(PROMPTS), rng.randrange(2, BLOCK if short else MAX_TOKENS))
            feed(ingest, batch(seq, *events))
            seq += 1
            # A first block that has all of its tokens shows the hash block size, too.
            named.update(
                event.group_idx
                for event in events
                if event.block_size == BLOCK and (event.group_idx or event.parent_block_hash is None)
            )
        catalog = ingest.profile.catalog
        for prompt in range(PROMPTS):
            num_tokens = rng.randrange(2, MAX_TOKENS)
            learned = hit(known(ingest), catalog, prompt, num_tokens)
            assert learned <= hit(engine.truth(), DECLARED, prompt, num_tokens), (catalog, prompt, num_tokens)
            if is_whole or len(named) == len(KINDS):
                assert learned == hit(known(ingest), DECLARED, prompt, num_tokens), (catalog, prompt, num_tokens)
