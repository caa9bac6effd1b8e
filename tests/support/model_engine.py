# SPDX-License-Identifier: Apache-2.0
"""A model of an engine: the copies of the blocks that it holds, and its messages, both vLLM's batches and the patch's.

A life of the engine (from one start to the next) has one layout of groups and one hash scheme. The counts of copies are
the truth; the messages are made from the same steps, and no count is derived from a message. The model has no sockets
and no clock, and gets its randomness from the caller.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np

from kvrouter.events.patch.messages import (
    DeclaredCatalog,
    DeclaredGroup,
    Events,
    HashExample,
    Heartbeat,
    Hello,
    PlaceSummary,
    ReportCleared,
    ReportEvent,
    ReportRemoved,
    ReportStored,
    SnapshotPart,
    pack_hashes,
)
from kvrouter.events.vllm.codec import encode_batch
from kvrouter.events.vllm.wire import WireCleared, WireEvent, WireRemoved, WireStored
from kvrouter.router.base.common.ids import CPU, GPU, Place
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_chain

PROMPTS = 4
# One more prompt for the quiet end alone, so that no message of the end repeats a block that was held before.
QUIET_PROMPT = PROMPTS
PROMPT_TOKENS = 128
# Copies of one block that the model keeps at most.
MOST_COPIES = 3
# Hashes in one part of a snapshot.
PART_HASHES = 8
TOKENS = [[1_000 * prompt + at for at in range(PROMPT_TOKENS)] for prompt in range(PROMPTS + 1)]

Held = dict[Place, frozenset[int]]


@dataclass(frozen=True)
class GroupShape:
    group_idx: int | None
    kind: str
    block_size: int
    window: int | None = None


@dataclass(frozen=True)
class Layout:
    name: str
    groups: tuple[GroupShape, ...]

    @property
    def hash_block_size(self) -> int:
        return math.gcd(*(group.block_size for group in self.groups))

    @property
    def scheduler_block_size(self) -> int:
        return math.lcm(*(group.block_size for group in self.groups))


FULL = "full_attention"
WINDOW = "sliding_window"
LAYOUTS = (
    Layout("full 16", (GroupShape(0, FULL, 16),)),
    Layout("full 32", (GroupShape(0, FULL, 32),)),
    Layout("full+window", (GroupShape(0, FULL, 16), GroupShape(1, WINDOW, 16, 32))),
    Layout("full+wider window", (GroupShape(0, FULL, 16), GroupShape(1, WINDOW, 16, 48))),
    Layout("window+full 32", (GroupShape(0, WINDOW, 16, 48), GroupShape(1, FULL, 32))),
    Layout("full+mamba", (GroupShape(0, FULL, 16), GroupShape(1, "mamba", 16))),
    Layout("full+mamba 64", (GroupShape(0, FULL, 16), GroupShape(1, "mamba", 64))),
)
# vLLM up to 0.19 names no group.
UNNAMED = Layout("unnamed", (GroupShape(None, FULL, 16),))
SCHEMES = (
    HashScheme.default("sha256"),
    HashScheme.default("sha256_cbor"),
    HashScheme.from_seed("sha256", "0"),
    HashScheme.from_seed("xxhash", "0"),
)
# A scheme that no router can guess.
UNKNOWN_SCHEME = HashScheme.from_seed("sha256", "a seed that nobody states")


@cache
def boundary_hashes(scheme: HashScheme, hash_block_size: int, prompt: int) -> list[int]:
    hashes, _ = hash_chain(scheme, None, np.array(TOKENS[prompt]), hash_block_size, (None,))
    return hashes.tolist()


@cache
def declared(layout: Layout, scheme: HashScheme) -> DeclaredCatalog:
    size = layout.hash_block_size
    return DeclaredCatalog(
        groups=[
            DeclaredGroup(group.group_idx or 0, group.kind, group.block_size, group.window, spec_class=number)
            for number, group in enumerate(layout.groups)
        ],
        hash_block_size=size,
        scheduler_block_size=layout.scheduler_block_size,
        partial_hits=False,
        hash_algo=scheme.algo,
        none_hash=scheme.none_hash.hex(),
        hash_example=HashExample(TOKENS[0][:size], boundary_hashes(scheme, size, 0)[0]),
        offload_blocks_per_chunk=1,
    )


class Life:
    """One life of an engine, from its start to its end.

    Batch `n` and report `n` describe the same step, and `held_after[n]` has the blocks that are held after it.
    """

    def __init__(
        self, number: int, layout: Layout, scheme: HashScheme, *, ring: int, patched: bool, dp_rank: int = 0
    ) -> None:
        self.number, self.layout, self.scheme, self.patched, self.dp_rank = number, layout, scheme, patched, dp_rank
        self.epoch = f"{number:016x}"
        self.start_s = 1_000.0 + number
        self.ended = False
        # Whether a router knows that this life has ended.
        self.end_heard = False
        self.counts: dict[Place, Counter[int]] = {}
        self.held_after: list[Held] = []
        self.steps: list[list[tuple[str, Place, list[int]]]] = []
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        # The seq of the last batch that is unreadable or was never sent: a router may never learn of the blocks that
        # were stored before it.
        self.last_hole = -1
        self.declares = patched
        self._last: Held = {}

    @property
    def next_seq(self) -> int:
        return len(self.held_after)

    def held(self, seq: int | None) -> Held | None:
        """Return the blocks held after batch `seq`, or None if this life has not sent it."""
        if seq is None or seq < 0:
            return {}
        return self.held_after[seq] if seq < len(self.held_after) else None

    @property
    def now(self) -> Held:
        return self.held_after[-1] if self.held_after else {}

    # -- steps: each returns (events of the engine's batch, events of the report)

    def compute(self, prompt: int, tokens: int) -> tuple[list[WireEvent], list[ReportEvent]]:
        """Compute a prompt: every group stores the blocks that it keeps, and sends an event even if it keeps none."""
        wire: list[WireEvent] = []
        report: list[ReportEvent] = []
        boundaries = boundary_hashes(self.scheme, self.layout.hash_block_size, prompt)
        for group in self.layout.groups:
            count = tokens // group.block_size
            if not count:
                continue
            scale = group.block_size // self.layout.hash_block_size
            hashes = [boundaries[(i + 1) * scale - 1] for i in range(count)]
            if group.kind == WINDOW:
                hashes = hashes[-math.ceil(((group.window or 0) - 1) / group.block_size) :]
            elif group.kind == "mamba":
                hashes = hashes[-1:] if prompt % 2 else []
            self._step("stored", Place(group.group_idx, GPU), hashes)
            wire.append(
                WireStored(
                    list(hashes), None, TOKENS[prompt][: count * group.block_size], group.block_size, None, GPU, None,
                    group_idx=group.group_idx,
                    kv_cache_spec_kind=None if group.group_idx is None else group.kind,
                    kv_cache_spec_sliding_window=group.window,
                )
            )  # fmt: skip
            report.append(
                ReportStored(
                    pack_hashes(hashes), group.group_idx, GPU, group.block_size, kind=group.kind,
                    sliding_window=group.window,
                )
            )  # fmt: skip
        return wire, report

    def evict(self, rng: random.Random, blocks: int) -> tuple[list[WireEvent], list[ReportEvent]]:
        wire: list[WireEvent] = []
        report: list[ReportEvent] = []
        for _ in range(blocks):
            places = [place for place, held in self.counts.items() if held]
            if not places:
                break
            place = rng.choice(places)
            self._remove(place, rng.choice(list(self.counts[place])), wire, report)
        return wire, report

    def offload(self, rng: random.Random) -> tuple[list[WireEvent], list[ReportEvent]]:
        """Store a block of the GPU on the CPU tier too, with the placeholder event that vLLM sends."""
        places = [place for place, held in self.counts.items() if held and place.medium == GPU]
        if not places:
            return [], []
        place = rng.choice(places)
        block = rng.choice(list(self.counts[place]))
        there = Place(place.group_idx, CPU)
        if self.counts.get(there, Counter())[block]:
            return [], []
        self._step("stored", there, [block])
        return (
            [WireStored([block], None, [], 0, None, CPU, None, group_idx=place.group_idx)],
            [ReportStored(pack_hashes([block]), place.group_idx, CPU)],
        )

    def clear(self) -> tuple[list[WireEvent], list[ReportEvent]]:
        for place in list(self.counts):
            self._step("cleared", place, [])
        return [WireCleared()], [ReportCleared(GPU), ReportCleared(CPU)]

    def odd_removal(self, rng: random.Random) -> tuple[list[WireEvent], list[ReportEvent]]:
        """Send a removal of a group that the engine does not have, or without a group; no held block goes."""
        groups = [group.group_idx for group in self.layout.groups]
        other = rng.choice([group for group in (None, 7) if group not in groups])
        return [WireRemoved([rng.randrange(1, 1_000)], GPU, group_idx=other)], []

    def trim(self) -> tuple[list[WireEvent], list[ReportEvent]]:
        """Remove a copy of each block that has more than `MOST_COPIES`."""
        wire: list[WireEvent] = []
        report: list[ReportEvent] = []
        for place, held in self.counts.items():
            for block in [block for block, copies in held.items() if copies > MOST_COPIES]:
                self._remove(place, block, wire, report)
        return wire, report

    def say(self, wire: list[WireEvent], report: list[ReportEvent], *, readable: bool = True) -> tuple[bytes, Events]:
        """Turn the events of a step into the next batch and the next report.

        Args:
            wire: The events of the batch.
            report: The events of the report.
            readable: Whether the batch can be decoded; otherwise its bytes are damaged from the beginning.
        """
        seq = self.next_seq
        self.held_after.append(self._snapshot())
        payload = (
            encode_batch(seq + self.number / 1_000, wire, self.dp_rank)
            if readable
            else b"\xc1%d.%d" % (self.number, seq)
        )
        self.ring.append((seq, payload))
        if not readable:
            self.last_hole = seq
        return payload, Events(self.epoch, self.start_s, 1.0, report, self.dp_rank)

    def skip(self) -> None:
        """Use up a seq without sending its batch, as vLLM does if a batch fails to encode."""
        self.last_hole = self.next_seq
        self.held_after.append(self._snapshot())

    def stored_since(self, first_seq: int) -> Held:
        """Return the blocks known to a reader that starts empty and reads all batches from `first_seq` on."""
        counts: dict[Place, Counter[int]] = {}
        for step in self.steps[first_seq:]:
            _apply(counts, step)
        return {place: frozenset(held) for place, held in counts.items() if held}

    def _remove(self, place: Place, block: int, wire: list[WireEvent], report: list[ReportEvent]) -> None:
        self._step("removed", place, [block])
        wire.append(WireRemoved([block], place.medium, group_idx=place.group_idx))
        report.append(ReportRemoved(pack_hashes([block]), place.group_idx, place.medium))

    def _step(self, action: str, place: Place, hashes: list[int]) -> None:
        while len(self.steps) <= self.next_seq:
            self.steps.append([])
        self.steps[self.next_seq].append((action, place, hashes))
        _apply(self.counts, [(action, place, hashes)])

    def _snapshot(self) -> Held:
        while len(self.steps) < self.next_seq + 1:
            self.steps.append([])
        held: Held = {}
        for place, counts in self.counts.items():
            if counts:
                before = self._last.get(place)
                held[place] = before if before is not None and before == counts.keys() else frozenset(counts)
        self._last = held
        return held

    # -- messages of the patch

    def summary(self) -> list[PlaceSummary]:
        return [
            PlaceSummary(place.group_idx, place.medium, len(held), sum(held.values()), sum(held) % 2**64)
            for place, held in self.counts.items()
            if held
        ]

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.epoch, self.start_s, 1.0, 1.0, self.summary(), int(self.declares))

    def hello(self) -> Hello:
        catalog = declared(self.layout, self.scheme) if self.declares else None
        if catalog is not None and self.dp_rank:
            catalog = msgspec.structs.replace(catalog, dp_rank=self.dp_rank)
        return Hello(
            1, self.epoch, self.start_s, self.next_seq, "x", 1.0, catalog_version=int(self.declares), catalog=catalog
        )

    def parts(self, request: int) -> list[SnapshotPart]:
        snapshot: list[SnapshotPart] = []
        for place, held in self.counts.items():
            hashes = list(held)
            for at in range(0, len(hashes), PART_HASHES):
                chunk = hashes[at : at + PART_HASHES]
                snapshot.append(
                    SnapshotPart(
                        request, self.epoch, self.start_s, self.next_seq, len(snapshot), pack_hashes(chunk),
                        place.group_idx, place.medium,
                        copied=[(block, held[block]) for block in chunk if held[block] > 1],
                    )
                )  # fmt: skip
        snapshot.append(
            SnapshotPart(
                request, self.epoch, self.start_s, self.next_seq, len(snapshot), last=True, places=self.summary()
            )
        )
        return snapshot


def _apply(counts: dict[Place, Counter[int]], step: list[tuple[str, Place, list[int]]]) -> None:
    for action, place, hashes in step:
        held = counts.setdefault(place, Counter())
        if action == "cleared":
            held.clear()
        for block in hashes:
            held[block] += 1 if action == "stored" else -1
            if held[block] <= 0:
                del held[block]
