# SPDX-License-Identifier: Apache-2.0
"""Learning a worker's KV cache groups from its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrouter.events.vllm.messages import BlockRemoved, BlockStored
from kvrouter.router.base.common.ids import GPU
from kvrouter.router.model.kvcache.catalog import FULL_KINDS, NO_EVIDENCE, Catalog, Group, build_catalog, group_of
from kvrouter.router.model.kvcache.offload_connectors import TierEvidence
from kvrouter.router.model.workers.registration import MAX_GROUPS, CatalogSpec

# How many prompts' first blocks are remembered while the chunk size is unknown. An engine offloads a block within one or
# two steps after it stored the block, so a few thousand prompts suffice.
MAX_ROOTS = 4_096

# Number of a worker's later events after which an odd event no longer counts. An odd event is a removal of a group that
# no store names, or one that contradicts all later events. An engine under load publishes this many events in seconds.
ODD_EVENTS_FORGOTTEN_AFTER = 1_024

# How many single-block stores of one group are remembered while its block size is unknown. They span several prompts,
# and one prompt suffices to show the size.
MAX_SINGLE_STORES = 4_096

# Stands for the block size of a group that only partial entries announced, until its first whole block shows the size.
# It is larger than any engine's block, so that no whole block is looked for, and it lies within the range that vLLM's
# rule looks at inside one block.
UNNAMED_BLOCK_TOKENS = 65_536

# How many block sizes of one group are remembered: its own, that of partial entries, and a few more to report a
# contradiction with.
MAX_BLOCK_SIZES = 8

# vLLM <= 0.19 names no groups and turns hybrid caching off when events are on, so its only group behaves like full
# attention.
UNNAMED_GROUP_KIND = "full_attention"


class LearnedGroup(msgspec.Struct, frozen=True):
    """The facts that events showed about one group, as stored in Redis."""

    group_idx: int | None
    kind: str | None
    # Tokens of the sliding window, or None.
    window: int | None
    block_sizes: list[int]
    # How the group's events contradict each other, or None.
    problem: str | None
    # Whether an odd event put the group in doubt, see `CatalogLearner.in_doubt`.
    doubtful: bool = False
    # The block sizes that events of the GPU announced.
    gpu_block_sizes: list[int] = []
    # Whether entries inside the group's blocks were announced.
    partial: bool = False
    # The block sizes of GPU events that announced several blocks each.
    whole_sizes: list[int] = []


class LearnedCatalog(msgspec.Struct, frozen=True):
    """All the facts that a `CatalogLearner` learned, as stored in Redis."""

    groups: list[LearnedGroup]
    blocks_per_chunk: int | None
    tier: TierEvidence = NO_EVIDENCE


class _Seen:
    """The facts that events have shown about one group so far."""

    __slots__ = (
        "block_sizes",
        "gpu_block_sizes",
        "kind",
        "partial",
        "problem",
        "recent_sizes",
        "single_stores",
        "whole_sizes",
        "window",
    )

    def __init__(self) -> None:
        self.kind: str | None = None
        self.window: int | None = None
        self.block_sizes: set[int] = set()
        # Block sizes that were announced since the group is in doubt.
        self.recent_sizes: set[int] = set()
        # The members of `block_sizes` that events of the GPU announced.
        self.gpu_block_sizes: set[int] = set()
        # The members of `gpu_block_sizes` that events of several blocks announced. An entry inside a block comes alone,
        # so these are sizes of whole blocks.
        self.whole_sizes: set[int] = set()
        # How the group's events contradict each other, or None.
        self.problem: str | None = None
        # Whether entries inside the group's blocks were announced.
        self.partial = False
        # Hashes of blocks that were stored one at a time; a parent that is missing here reveals a partial entry.
        self.single_stores: set[int] = set()

    @property
    def stored(self) -> bool:
        """Whether a store described the group, rather than only removals naming it."""
        return self.kind is not None or bool(self.block_sizes)


class CatalogLearner:
    """A learner of one worker's catalog from the worker's events.

    The learner assumes that the groups seen so far are all groups; a group that shows up later counts at once. A group
    that only placeholders or removals name, or that contradicts itself, makes the catalog incomplete. The learner
    forgets such a group or contradiction if it does not recur within ODD_EVENTS_FORGOTTEN_AFTER events. `version`
    changes whenever the catalog does.
    """

    def __init__(self, spec: CatalogSpec | None = None, problem: str | None = None) -> None:
        """Start with the stated groups of `spec`.

        Args:
            spec: The stated part of the catalog, None if nothing is stated.
            problem: The reason why the engine's own events prove no hit, or None if they do.
        """
        self._source = "configured"
        self._problem = problem
        self.version = 0
        self._state(spec or CatalogSpec())
        self._seen: dict[int | None, _Seen] = {}
        self._life_is_whole = False
        # Groups whose blocks may be larger than the announced ones.
        self._unsized: set[int | None] = set()
        # The number of events so far.
        self._events = 0
        # The event number at which each group in doubt is judged again.
        self._judged_at: dict[int | None, int] = {}
        self._blocks_per_chunk: int | None = None
        self._tier = NO_EVIDENCE
        # Block sizes by the hash of a prompt's first block, newest last. A first block that an offload tier holds as a
        # chunk shows that chunks are single blocks.
        self._roots: dict[int, int] = {}

    def _state(self, spec: CatalogSpec) -> None:
        self._spec = spec
        self._stated = {group.group_idx: group_of(group) for group in spec.groups}
        self.version += 1

    def declare(self, spec: CatalogSpec, problem: str | None) -> None:
        """Replace the stated catalog by the one that the engine itself declares.

        Args:
            spec: The declared catalog.
            problem: The reason why no hit can be predicted in spite of the declaration, or None.
        """
        self._source, self._problem = "declared", problem
        self._state(spec)

    def begin_life(self) -> None:
        """Note that all events since the engine's start follow, so a block that none of them stores was never stored."""
        self._life_is_whole = True

    def miss_event(self) -> None:
        """Note that an event could not be read, so a block without a store may have been stored all the same."""
        self._life_is_whole = False

    @property
    def wants_parents(self) -> bool:
        """Whether `parent` may still teach something."""
        return self._life_is_whole and bool(self._unsized)

    def parent(self, event: BlockStored) -> None:
        """Learn whether a GPU store of full attention is a whole block or an entry inside a block.

        Call it after `stored`. Both are announced in the hash block size (vLLM 0.32 block_pool.py: cache_full_blocks,
        cache_partial_block). Whole blocks are stored several at a time, each after its parent; no event stores the
        parent of an entry inside a block.
        """
        seen = self._seen.get(event.group_idx)
        if seen is None or event.group_idx not in self._unsized or not len(event.block_hashes):
            return
        parent = event.parent_block_hash
        orphan = parent is not None and parent not in seen.single_stores
        whole = seen.kind not in FULL_KINDS or len(seen.block_sizes) > 1 or len(event.block_hashes) > 1
        if whole or orphan or len(seen.single_stores) >= MAX_SINGLE_STORES:
            self._unsized.discard(event.group_idx)
            seen.single_stores.clear()
            if orphan and not whole:
                seen.partial = True
                self.version += 1
        else:
            seen.single_stores.add(int(event.block_hashes[0]))

    def learn_whole_size(self, event: BlockStored) -> None:
        """Learn the size of whole blocks from the form of a store that announced several blocks. Call it after `stored`.

        Source: vLLM 0.32.0 v1/core/block_pool.py: cache_partial_block announces one entry per event.
        """
        seen = self._seen.get(event.group_idx)
        if seen is not None and event.medium == GPU and event.block_size in seen.gpu_block_sizes - seen.whole_sizes:
            seen.whole_sizes.add(event.block_size)
            self.version += 1

    @property
    def in_doubt(self) -> bool:
        """Whether odd events came, so that even an event that repeats an earlier one has to be looked at."""
        return bool(self._judged_at)

    def knows(self, group_idx: int | None) -> bool:
        """Return whether a store described this group, so that its removals teach nothing new."""
        seen = self._seen.get(group_idx)
        return seen is not None and seen.stored

    def elapse(self, events: int) -> None:
        """Count applied events, and judge again the groups in doubt whose time is over."""
        self._events += events
        if self._judged_at:
            for group_idx in [group for group, at in self._judged_at.items() if at <= self._events]:
                self._judge(group_idx)

    def _doubt(self, group_idx: int | None) -> None:
        self._judged_at[group_idx] = self._events + ODD_EVENTS_FORGOTTEN_AFTER
        if group_idx in self._seen:
            self._seen[group_idx].recent_sizes.clear()

    def _judge(self, group_idx: int | None) -> None:
        """Settle the doubt about a group after enough events without another odd one.

        A group that contradicted itself keeps the block sizes announced since then; if there are none, the doubt goes
        on. A group that was in doubt for another reason is dropped.
        """
        seen = self._seen[group_idx]
        if seen.problem is not None and not seen.recent_sizes:
            self._doubt(group_idx)
            return
        del self._judged_at[group_idx]
        if seen.problem is None:
            del self._seen[group_idx]
        else:
            seen.problem, seen.block_sizes = None, set(seen.recent_sizes)
            seen.gpu_block_sizes &= seen.block_sizes
            seen.whole_sizes &= seen.block_sizes
        self.version += 1

    def _contradicts_names(self, group_idx: int | None) -> bool:
        """Return whether this group has a number although groups known for certain have none, or the reverse.

        An engine numbers all its groups, or it has one group without a number.
        """
        settled = (index for index, seen in self._seen.items() if seen.stored and index not in self._judged_at)
        return any((index is None) is not (group_idx is None) for index in settled)

    def _hear_again(self, group_idx: int | None, seen: _Seen, block_size: int) -> None:
        """Judge a group in doubt by a new store of it."""
        if self._contradicts_names(group_idx) or (block_size <= 0 and not seen.stored):
            self._doubt(group_idx)
        elif seen.problem is None:
            # Only removals named the group so far; this store shows that the group exists.
            del self._judged_at[group_idx]
        elif block_size > 0 and len(seen.recent_sizes) < MAX_BLOCK_SIZES:
            seen.recent_sizes.add(block_size)

    def stored(self, event: BlockStored, *, shows_tier: bool = True) -> None:
        """Learn about a KV cache group from one of its Stored events, even if the event's list of hashes is empty.

        Args:
            event: The event.
            shows_tier: Whether the shape of an event of a medium other than the GPU shows which connector sent it.
                False for events built from the patch's reports, and for SGLang.
        """
        seen = self._touch(event.group_idx, event.medium)
        if seen is not None and event.group_idx in self._judged_at:
            self._hear_again(event.group_idx, seen, event.block_size)
        if event.medium != GPU and shows_tier:
            self._judge_tier(event, seen)
        if event.medium != GPU and event.block_size == 0:
            self._judge_placeholder(event, seen)
        if seen is None or event.block_size <= 0:
            return
        kind = event.kind or (UNNAMED_GROUP_KIND if event.group_idx is None else None)
        if event.medium != GPU:
            self._learn_chunk(event, seen)
            if kind is None:
                return
        if event.block_size not in seen.block_sizes and len(seen.block_sizes) < MAX_BLOCK_SIZES:
            seen.block_sizes.add(event.block_size)
            self.version += 1
            if len(seen.block_sizes) > 2 or max(seen.block_sizes) % min(seen.block_sizes):
                self._contradict(event, f"announced with block sizes {sorted(seen.block_sizes)}")
        if event.medium == GPU and event.block_size in seen.block_sizes:
            seen.gpu_block_sizes.add(event.block_size)
        if kind is not None and (kind, event.sliding_window) != (seen.kind, seen.window):
            if seen.kind is not None:
                self._contradict(
                    event,
                    f"announced as {seen.kind} (window {seen.window}) and as {kind} (window {event.sliding_window})",
                )
            seen.kind, seen.window = kind, event.sliding_window
            self.version += 1

    def _judge_tier(self, event: BlockStored, seen: _Seen | None) -> None:
        tier = self._tier.add(event, seen.gpu_block_sizes if seen else ())
        if tier is not self._tier:
            self._tier = tier
            self.version += 1

    def removed(self, event: BlockRemoved) -> None:
        """Put a group in doubt if only removals have named it, because a removal does not describe its group."""
        seen = self._touch(event.group_idx, event.medium)
        if seen is not None and not seen.stored:
            self._doubt(event.group_idx)

    def _contradict(self, event: BlockStored, what: str) -> None:
        self._doubt(event.group_idx)
        seen = self._seen[event.group_idx]
        seen.problem = f"group {event.group_idx} contradicts itself: {what}"
        seen.recent_sizes.add(event.block_size)

    def _touch(self, group_idx: int | None, medium: str) -> _Seen | None:
        seen = self._seen.get(group_idx)
        if seen is None:
            # vLLM 0.20 to 0.23 omits the group from offload events, so an offload event without a number adds no group.
            if group_idx is None and medium != GPU:
                return None
            # One group over the limit is kept, so that the catalog reports the excess.
            if len(self._seen) > MAX_GROUPS:
                return None
            seen = self._seen[group_idx] = _Seen()
            self._unsized.add(group_idx)
            self.version += 1
            if self._contradicts_names(group_idx):
                self._doubt(group_idx)
        return seen

    def _learn_chunk(self, event: BlockStored, seen: _Seen) -> None:
        # A self-describing store names all blocks of its chunk. A partial tail has a smaller block size and is ignored
        # here. Stores of a SimpleCPUOffloadConnector look like chunks of one block, which does no harm, because the
        # rule of that connector does not use the chunk size.
        count = len(event.block_hashes)
        if seen.block_sizes and event.block_size == max(seen.block_sizes) and count > (self._blocks_per_chunk or 0):
            self._blocks_per_chunk = count
            self.version += 1

    @property
    def wants_roots(self) -> bool:
        """Whether the chunk size is still unknown, so that `roots` should get the first blocks of prompts."""
        return self._blocks_per_chunk is None

    def roots(self, event: BlockStored, hashes: Iterable[int]) -> None:
        """Remember the first blocks of prompts, whose stores have no parent.

        Only groups of full attention count, as only they announce every block.

        Args:
            event: The form of all these stores, which differ in their hashes alone.
            hashes: The hashes of the first blocks.
        """
        if event.kind not in FULL_KINDS:
            return
        for block_hash in hashes:
            self._roots[block_hash] = event.block_size
            if len(self._roots) > MAX_ROOTS:
                del self._roots[next(iter(self._roots))]

    def _judge_placeholder(self, event: BlockStored, seen: _Seen | None) -> None:
        # The hash of a chunk is that of its last block, so a chunk that ends with the first block of a prompt is that
        # block alone.
        if self._blocks_per_chunk is not None or seen is None or not seen.block_sizes:
            return
        size = max(seen.block_sizes)
        if any(self._roots.get(int(block_hash)) == size for block_hash in event.block_hashes):
            self._blocks_per_chunk = 1
            self.version += 1

    def catalog(self, hash_block_size: int | None = None, hash_algo: str | None = None) -> Catalog:
        """Return the current catalog: the stated groups, and the learned groups that are not stated.

        Args:
            hash_block_size: The size that verified hashes showed, for an engine whose prefix_match_unit is finer than
                the gcd of its block sizes; None if no hash is verified.
            hash_algo: The algorithm of the worker's hash scheme, in place of the stated one; None to keep the stated one.
        """
        spec = self._spec
        if hash_algo is not None:
            spec = msgspec.structs.replace(spec, hash_algo=hash_algo)
        if spec.hash_block_size is None and hash_block_size is not None:
            spec = msgspec.structs.replace(spec, hash_block_size=hash_block_size)
        stated = self._stated_as_announced()
        problem = self._problem or self._contradiction(stated, hash_block_size)
        groups = dict(stated)
        # Engines announce entries inside blocks only to keep Mamba states.
        partial = any(seen.partial for seen in self._seen.values()) and any(
            seen.kind == "mamba" for seen in self._seen.values()
        )
        if partial and spec.partial_hits is None:
            spec = msgspec.structs.replace(spec, partial_hits=True)
        sizes = [min(seen.block_sizes) for seen in self._seen.values() if seen.block_sizes]
        finest = spec.hash_block_size or min(sizes, default=0)
        for group_idx, seen in self._seen.items():
            if group_idx in stated:
                continue
            if group_idx is None and len(self._seen) > 1:
                problem = problem or "events of one engine came both with and without group_idx"
                continue
            size = max(seen.block_sizes, default=0)
            if partial and seen.partial and len(seen.block_sizes) == 1:
                size = max(size, UNNAMED_BLOCK_TOKENS // size * size)
            problem = problem or seen.problem or _size_problem(group_idx, seen.block_sizes, finest)
            if seen.kind is None and size:
                problem = problem or (
                    f"group {group_idx} was announced without its kind (vLLM before 0.22.1): register a catalog"
                )
            groups[group_idx] = Group(group_idx, seen.kind or "unknown", size, seen.window)
        source = self._source if stated and stated.keys() >= groups.keys() else "learned"
        return build_catalog(groups.values(), source, spec, self._blocks_per_chunk, problem, self._tier)

    def _stated_as_announced(self) -> dict[int | None, Group]:
        """Return the stated groups by the numbers that events give them.

        The only group of an engine has no number in the events of SGLang and of vLLM up to 0.19, and 0 in later ones.
        So a group that is stated alone is taken for the one that is announced alone, if one of the two has no number.
        """
        if len(self._stated) == len(self._seen) == 1:
            (number, group), (announced,) = *self._stated.items(), self._seen
            if announced != number and None in (number, announced):
                return {announced: msgspec.structs.replace(group, group_idx=announced)}
        return self._stated

    def _contradiction(self, stated: dict[int | None, Group], hash_block_size: int | None) -> str | None:
        """Return how the events contradict the stated catalog, so that no announced block would be found, or None.

        Args:
            stated: The stated groups.
            hash_block_size: The size that verified hashes showed, or None if no hash is verified.
        """
        stated_size = self._spec.hash_block_size
        if hash_block_size is not None and stated_size not in (None, hash_block_size):
            return (
                f"its catalog states hash_block_size {stated_size}, but the hashes of its events cover {hash_block_size} tokens: "
                "register the engine's size, or none"
            )
        if stated and self._seen and not stated.keys() & self._seen.keys():
            return (
                f"its catalog states {_numbers(stated)}, its events announce {_numbers(self._seen)}: register the groups that "
                "the engine has, or no catalog"
            )
        for number, group in stated.items():
            seen = self._seen.get(number)
            sizes = set() if seen is None else seen.gpu_block_sizes
            if seen is None or not sizes or group.block_size in sizes:
                continue
            # With several groups, entries inside blocks are announced in the hash block size.
            inner = len(stated.keys() | self._seen.keys()) > 1 and not any(group.block_size % size for size in sizes)
            if seen.whole_sizes or not inner:
                return (
                    f"its catalog states blocks of {group.block_size} tokens for {group.name}, its events announce "
                    f"{', '.join(map(str, sorted(sizes)))}: register the engine's block size"
                )
        return None

    def dump(self) -> bytes:
        """Return the learned facts as bytes that `load` reads in another process of the router."""
        groups = [
            LearnedGroup(
                index,
                seen.kind,
                seen.window,
                sorted(seen.block_sizes),
                seen.problem,
                index in self._judged_at,
                sorted(seen.gpu_block_sizes),
                seen.partial,
                sorted(seen.whole_sizes),
            )
            for index, seen in self._seen.items()
        ]
        return msgspec.json.encode(LearnedCatalog(groups, self._blocks_per_chunk, self._tier))

    def load(self, dumped: bytes) -> None:
        """Take over the facts that `dump` returned. Raises msgspec.DecodeError if `dumped` has another form."""
        learned = msgspec.json.decode(dumped, type=LearnedCatalog)
        for group in learned.groups:
            seen = self._seen[group.group_idx] = _Seen()
            seen.kind, seen.window, seen.problem = group.kind, group.window, group.problem
            seen.block_sizes = set(group.block_sizes)
            if group.doubtful or group.problem is not None:
                self._doubt(group.group_idx)
            seen.gpu_block_sizes, seen.whole_sizes = set(group.gpu_block_sizes), set(group.whole_sizes)
            seen.partial = group.partial
        self._tier = learned.tier
        self._blocks_per_chunk = learned.blocks_per_chunk
        self.version += 1


def _numbers(groups: Iterable[int | None]) -> str:
    return ", ".join("a group without a number" if number is None else f"group {number}" for number in groups)


def _size_problem(group_idx: int | None, sizes: set[int], finest: int) -> str | None:
    """Return how the announced block sizes of a group contradict each other, or None.

    A group has one block size. Its partial entries are announced in the hash block size, the finest size of all groups.
    """
    if len(sizes) <= 1 or sizes == {max(sizes), finest}:
        return None
    return f"group {group_idx} contradicts itself: announced with block sizes {sorted(sizes)}"
