# SPDX-License-Identifier: Apache-2.0
"""The input of the benchmarks: prompts that share beginnings, their places, and the events that announce them.

A prompt is 512 blocks of 16 tokens: the first 128 belong to one of 8 families (system prompts), the other 384 to it
alone. Each prompt is cached on two workers. All values are random, from a fixed seed. Hashes are vLLM's own (SHA-256
chain over pickle), and beside them the hashes that dynamo computes from the same tokens. Only `write_frames` and
`read_frames` touch files; everything else is pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.wire import WireStored
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_chain

MODEL = "m"
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 512
PREFIX_BLOCKS = 128
FAMILIES = 8
COPIES = 2
WORKERS = 16
# Llama 3's vocabulary: most ids take five bytes in MessagePack, as on a real wire.
VOCABULARY = 128_256
# dynamo hashes the tokens of each block alone: xxh3-64 of the ids as uint32, seed 1337 (checked against dynamo's own
# function).
DYNAMO_SEED = 1337
# The events of one batch, which is one engine step: a few prefill chunks.
EVENTS_PER_BATCH = 4


class Kind(NamedTuple):
    """A KV cache group as its events name it."""

    name: str
    # Tokens of the sliding window, or None.
    window: int | None = None


ONE_GROUP = (Kind("full_attention"),)
# Gemma 3: of six layers one attends to everything, five to a window.
SIX_GROUPS = (Kind("full_attention"), *(Kind("sliding_window", 1_024) for _ in range(5)))

# The header of each payload in a frame file: worker, seq, blocks, bytes.
FRAME = struct.Struct("=HQII")


class Chain(NamedTuple):
    """One prompt."""

    family: int
    tokens: NDArray[np.int64]
    # The hash of each block, as the engine announces it.
    hashes: NDArray[np.uint64]
    # The hash of each block that dynamo is queried with.
    dynamo_hashes: NDArray[np.uint64]


class Frame(NamedTuple):
    """One batch as one worker publishes it."""

    worker: int
    seq: int
    # The blocks of all groups together.
    blocks: int
    payload: bytes


class Workload:
    """Prompts and their places, made on request; the same seed gives the same prompts."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._scheme = HashScheme.default()
        # The tokens of each family's prefix, its hashes and its last digest.
        self._families: list[tuple[NDArray[np.int64], NDArray[np.uint64], bytes]] = []
        for _ in range(FAMILIES):
            tokens = self._tokens(PREFIX_BLOCKS)
            self._families.append((tokens, *hash_chain(self._scheme, None, tokens, BLOCK_TOKENS, (None,))))

    def _tokens(self, blocks: int) -> NDArray[np.int64]:
        return self._rng.integers(0, VOCABULARY, blocks * BLOCK_TOKENS)

    def chain(self, family: int) -> Chain:
        prefix, prefix_hashes, digest = self._families[family]
        own = self._tokens(CHAIN_BLOCKS - PREFIX_BLOCKS)
        tokens = np.concatenate([prefix, own])
        own_hashes, _ = hash_chain(self._scheme, digest, own, BLOCK_TOKENS, (None,))
        hashes = np.concatenate([prefix_hashes, own_hashes])
        rows = tokens.astype(np.uint32).reshape(-1, BLOCK_TOKENS)
        local = np.array([xxhash.xxh3_64_intdigest(row.tobytes(), seed=DYNAMO_SEED) for row in rows], np.uint64)
        return Chain(family, tokens, hashes, local)

    def chains(self, count: int) -> list[Chain]:
        return [self.chain(i % FAMILIES) for i in range(count)]


def chains_for(entries: int, workers: int = WORKERS) -> int:
    """Return how many prompts give about that many (worker, block) entries when each is placed COPIES times."""
    prefixes = FAMILIES * PREFIX_BLOCKS * workers
    return max(FAMILIES, round((entries - prefixes) / ((CHAIN_BLOCKS - PREFIX_BLOCKS) * COPIES)))


def places(index: int, workers: int = WORKERS) -> tuple[int, ...]:
    """Return the workers that hold prompt `index`; every worker meets every family."""
    turn = index // FAMILIES
    return tuple(sorted({(index + turn) % workers, (index + turn + workers // 2) % workers}))


class Publishing:
    """The events of a fleet in which prompts come one after another.

    Blocks that a worker holds already are not announced again. Every group keeps every block.
    """

    def __init__(
        self, workers: int = WORKERS, groups: Sequence[Kind] = ONE_GROUP, events_per_batch: int = EVENTS_PER_BATCH
    ) -> None:
        """Begin with nothing cached."""
        self._workers = workers
        self._groups = groups
        self._events_per_batch = events_per_batch
        self._families: set[tuple[int, int]] = set()
        self._seqs = [0] * workers
        self.held: dict[int, list[int]] = {}
        self.entries = 0

    def frames(self, chains: Iterable[tuple[int, Chain]], blocks_per_event: int) -> Iterator[Frame]:
        """Yield the batches for prompts that come with their index; a batch has blocks of one prompt only."""
        for index, chain in chains:
            for worker in places(index, self._workers):
                self.held.setdefault(index, []).append(worker)
                first = PREFIX_BLOCKS if (worker, chain.family) in self._families else 0
                self._families.add((worker, chain.family))
                yield from self._store(worker, chain, first, blocks_per_event)

    def _store(self, worker: int, chain: Chain, first: int, blocks_per_event: int) -> Iterator[Frame]:
        step = blocks_per_event * self._events_per_batch
        for start in range(first, CHAIN_BLOCKS, step):
            end = min(start + step, CHAIN_BLOCKS)
            events = [
                stored(chain, a, min(a + blocks_per_event, end), index, kind)
                for a in range(start, end, blocks_per_event)
                for index, kind in enumerate(self._groups)
            ]
            blocks = (end - start) * len(self._groups)
            yield Frame(worker, self._seqs[worker], blocks, encode_batch(1.7e9, events, 0))
            self._seqs[worker] += 1
            self.entries += blocks

    @property
    def next_seqs(self) -> list[int]:
        return list(self._seqs)


def at_once(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield batches in the order in which workers that run at once publish them: one of each in turn."""
    by_worker: dict[int, list[Frame]] = {}
    for frame in frames:
        by_worker.setdefault(frame.worker, []).append(frame)
    for turn in zip_longest(*by_worker.values()):
        yield from filter(None, turn)


def last_placed(held: Mapping[int, Sequence[int]], prompts: int) -> Iterator[tuple[int, int]]:
    """Yield (index, worker) of the last of `prompts` prompts; once these are visible, all prompts before them are."""
    for index in range(max(0, prompts - 2 * WORKERS), prompts):
        yield from ((index, worker) for worker in held[index])


def stored(chain: Chain, start: int, end: int, group: int = 0, kind: Kind = ONE_GROUP[0]) -> WireStored:
    """Return the event for blocks start..end-1 of a prompt, with the fields that vLLM 0.32 fills."""
    return WireStored(
        block_hashes=chain.hashes[start:end].tolist(),
        parent_block_hash=int(chain.hashes[start - 1]) if start else None,
        token_ids=chain.tokens[start * BLOCK_TOKENS : end * BLOCK_TOKENS].tolist(),
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
        kv_cache_spec_kind=kind.name,
        kv_cache_spec_sliding_window=kind.window,
    )


def write_frames(path: Path, frames: Iterable[Frame]) -> tuple[int, int]:
    """Write frames for publisher.py, and return the number of batches and of blocks."""
    batches = blocks = 0
    with path.open("wb") as file:
        for frame in frames:
            file.write(FRAME.pack(frame.worker, frame.seq, frame.blocks, len(frame.payload)))
            file.write(frame.payload)
            batches += 1
            blocks += frame.blocks
    return batches, blocks


def read_frames(path: Path) -> list[Frame]:
    data = path.read_bytes()
    frames = []
    at = 0
    while at < len(data):
        worker, seq, blocks, size = FRAME.unpack_from(data, at)
        at += FRAME.size
        frames.append(Frame(worker, seq, blocks, data[at : at + size]))
        at += size
    return frames
