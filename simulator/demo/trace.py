# SPDX-License-Identifier: Apache-2.0
"""The demo's prompts, and the choices that other routers would make. Pure: randomness is passed in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrouter.simulator.cache.hit import group_hashes
from kvrouter.simulator.cache.pool import Key
from kvrouter.simulator.cache.shapes import FULL_KINDS, Geometry, gemma3, gpt_oss, llama, qwen3_next
from kvrouter.simulator.cache.text import next_token
from kvrouter.simulator.cache.tokenizer import VOCABULARY
from kvrouter.simulator.engine.replica import Replica


@dataclass(frozen=True, slots=True)
class DemoScene:
    """A shape scaled down to prompts of a few hundred tokens, with a pool far smaller than the prompts fill."""

    geometry: Geometry
    num_blocks: int
    chunk_tokens: int = 128

    def replica(self) -> Replica:
        """Return a replica of this scene that publishes nothing."""
        return Replica(self.geometry, self.num_blocks, on_step=lambda _: None, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn of a conversation: the whole text so far, and the user's next words."""

    conversation: int
    turn: int
    tokens: tuple[int, ...]
    max_tokens: int


# Pools of a fifth to a third of the blocks that the prompts fill, so that every replica evicts all the time.
SCENES = {
    "llama": DemoScene(llama(16), 80),
    "gemma3": DemoScene(gemma3(16, 128), 240),
    "gpt-oss": DemoScene(gpt_oss(16, 128), 100),
    "qwen3-next": DemoScene(qwen3_next(32, 3), 60),
}

# The conversations that run at the same time, and the length at which one ends. With fewer or shorter ones nothing
# would be evicted between two turns, with more or longer ones everything.
ACTIVE_CONVERSATIONS = 6
LONGEST_TEXT_TOKENS = 560

# For the prompts of a trace, which may be long: a pool holds LONGEST_SHARE times the blocks that the longest prompt may
# need, or 1 / POOL_SHARE of the blocks that all prompts fill.
LONGEST_SHARE = 1.2
POOL_SHARE = 6
TRACE_CHUNK_TOKENS = 2_048


def make_prompts(rng: random.Random, count: int) -> list[Prompt]:
    """Make `count` turns of interleaved conversations that share three system prompts; four turns each on average.

    The answers are those of the simulator, so that a prompt contains the real conversation before it.
    """

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    systems = [words(200, 400) for _ in range(3)]
    texts: list[list[int]] = []
    turns: list[int] = []
    active: list[int] = []
    prompts: list[Prompt] = []
    while len(prompts) < count:
        while len(active) < ACTIVE_CONVERSATIONS:
            active.append(len(texts))
            texts.append(list(rng.choice(systems)))
            turns.append(0)
        conversation = rng.choice(active)
        text = texts[conversation]
        text += words(16, 60)
        turns[conversation] += 1
        prompts.append(Prompt(conversation, turns[conversation], tuple(text), max_tokens=rng.randint(8, 24)))
        for _ in range(prompts[-1].max_tokens):
            text.append(next_token(text))
        if rng.random() < 0.25 or len(text) > LONGEST_TEXT_TOKENS:
            active.remove(conversation)
    return prompts


def roomy(scene: DemoScene, prompts: Sequence[Prompt], working_set: int) -> DemoScene:
    """Return the scene for prompts of any length: pools of a share of the working set that fit the longest one."""
    longest = max(len(prompt.tokens) + prompt.max_tokens for prompt in prompts)
    # A request needs at most its whole text in every group.
    needed = sum(-(-longest // group.block_size) for group in scene.geometry.groups)
    blocks = max(scene.num_blocks, int(needed * LONGEST_SHARE), working_set // POOL_SHARE)
    return replace(scene, num_blocks=blocks, chunk_tokens=TRACE_CHUNK_TOKENS)


def full_attention_hit(replica: Replica, tokens: Sequence[int]) -> int:
    """Return the hit that a router expects that knows only full attention: its unbroken run of blocks, in tokens."""
    geometry = replica.geometry
    ids = [i for i, group in enumerate(geometry.groups) if group.kind in FULL_KINDS]
    size = geometry.groups[ids[0]].block_size
    hashes = group_hashes(replica.text(tokens).hashes, geometry.hash_block_size, size)
    covered = 0
    for block_hash in hashes[: (len(tokens) - 1) // size]:
        if not all(replica.pool.copies(Key(i, block_hash)) for i in ids):
            break
        covered += size
    return covered


def full_attention_choice(hits: Sequence[int], served: Sequence[int]) -> int:
    """Choose the longest hit, as such a router does; among equals, the replica that has served the fewest."""
    return max(range(len(hits)), key=lambda i: (hits[i], -served[i]))


class Rivals:
    """Two more fleets that serve the same prompts: one is routed round robin, one by full attention only.

    Both start with `warmup` prompts round robin, as the demo's own fleet does.
    """

    def __init__(self, scene: DemoScene, replicas: int, warmup: int) -> None:
        self._warmup = warmup
        self._fleets = [[scene.replica() for _ in range(replicas)] for _ in range(2)]
        self._served = [0] * replicas
        self._number = 0
        self.round_robin_reused = 0
        self.full_attention_reused = 0

    def serve(self, prompt: Prompt) -> None:
        """Serve one prompt on each fleet, and add up the reused tokens."""
        turn = self._number % len(self._served)
        choice = turn
        if self._number >= self._warmup:
            hits = [full_attention_hit(replica, prompt.tokens) for replica in self._fleets[1]]
            choice = full_attention_choice(hits, self._served)
        self._served[choice] += 1
        self._number += 1
        reused = [
            fleet[i].run(prompt.tokens, max_tokens=prompt.max_tokens).reused_tokens
            for fleet, i in zip(self._fleets, (turn, choice), strict=True)
        ]
        self.round_robin_reused += reused[0]
        self.full_attention_reused += reused[1]


def working_set_blocks(scene: DemoScene, prompts: Sequence[Prompt]) -> int:
    """Count the blocks that would be findable in the end on one replica that never had to evict any."""
    endless = Replica(scene.geometry, 1_000_000, on_step=lambda _: None, chunk_tokens=scene.chunk_tokens)
    for prompt in prompts:
        endless.run(prompt.tokens, max_tokens=prompt.max_tokens)
    return len(endless.pool.resident())
