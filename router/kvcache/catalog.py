# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of a worker, and the geometry that vLLM derives from them.

A catalog is stated by the user or the engine patch, learned from events, or both: what is stated overrides what is learned.
It does not know blocks, hits or Redis. A catalog that is not whole says why in `problem`, and then earns no credit.

Sources: vLLM 0.32.0 v1/core/kv_cache_utils.py:750 (partial hits), :804 (block sizes), v1/core/kv_cache_coordinator.py:708 (spec
groups), v1/kv_cache_interface.py:146 (kinds).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import msgspec

from kvrouter.events.vllm.messages import BlockRemoved, BlockStored
from kvrouter.router.common.ids import GPU
from kvrouter.router.kvcache.offload_connectors import OffloadTier, TierEvidence
from kvrouter.router.workers.registration import MAX_GROUPS, MAX_TOKENS, CatalogSpec, GroupSpec


class GroupRule(Enum):
    """Which floor function judges a group; the values are the kernels' codes."""

    FULL = 0
    SLIDING_WINDOW = 1
    CHUNKED_LOCAL = 2
    MAMBA = 3


# KVCacheSpecKind of vLLM 0.32.0; cross_attention, encoder_only_attention and unknown have no rule: prefix caching is off there.
RULE_OF_KIND = {
    "full_attention": GroupRule.FULL,
    "mla_attention": GroupRule.FULL,
    "sink_full_attention": GroupRule.FULL,
    "sliding_window": GroupRule.SLIDING_WINDOW,
    "sliding_window_mla": GroupRule.SLIDING_WINDOW,
    "mamba": GroupRule.MAMBA,
    "chunked_local_attention": GroupRule.CHUNKED_LOCAL,
}

FULL_KINDS = frozenset(kind for kind, rule in RULE_OF_KIND.items() if rule is GroupRule.FULL)

# Prompts whose first block is remembered while the chunk size is unknown; offloading follows the store within a step or two.
MAX_ROOTS = 4_096

# Events of a worker after which an odd one no longer counts: a removal of a group that nothing else speaks of, or what contradicts
# all that came since. An engine under load publishes so many in seconds.
ODD_EVENTS_FORGOTTEN_AFTER = 1_024

# Stores of a group whose blocks came one at a time so far that are remembered: some prompts, of which one shows the group's size.
MAX_SINGLE_STORES = 4_096

# Stands for the block size of a group that is known from partial entries alone: more than any engine's, so that no whole block is
# looked for, and within what vLLM's rule looks at inside one block. The first whole block names the size.
UNNAMED_BLOCK_TOKENS = 65_536

# Block sizes of one group that are remembered: its own, that of partial entries, and some to show a contradiction by.
MAX_BLOCK_SIZES = 8

NO_EVIDENCE = TierEvidence()

# vLLM <= 0.19 names no groups and turns hybrid caching off when events are on, so its one group behaves as full attention.
UNNAMED_GROUP_KIND = "full_attention"


class Group(GroupSpec, frozen=True):
    """One KV cache group as the hit rule sees it: what was stated or learned, and the rule that follows from its kind."""

    @property
    def rule(self) -> GroupRule | None:
        return RULE_OF_KIND.get(self.kind)

    @property
    def name(self) -> str:
        index = "the unnamed group" if self.group_idx is None else f"group {self.group_idx}"
        return f"{index} ({self.kind})"


class SpecGroup(msgspec.Struct, frozen=True):
    """Groups of equal spec, looked up jointly: a block counts when it is resident in all of them."""

    rule: GroupRule
    members: tuple[Group, ...]
    eagle: bool

    @property
    def first(self) -> Group:
        return self.members[0]


class Catalog(msgspec.Struct, frozen=True):
    """What the hit rule needs to know about one worker. All sizes in tokens.

    Invariant: when `problem` is None, every cacheable group has a rule and a block size that hash_block_size divides.
    """

    groups: tuple[Group, ...]
    source: str
    problem: str | None
    hash_block_size: int
    scheduler_block_size: int
    partial_hits: bool
    # Blocks of a group that the offload tier stores and loads as one; None: not known yet.
    blocks_per_chunk: int | None
    offload: OffloadTier

    @property
    def align(self) -> int:
        """Every hit is a multiple of this. Source: kv_cache_coordinator.py:672 (hybrid), :466 (one group)."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @property
    def suffix_align(self) -> int:
        """What the hits of a SimpleCPUOffloadConnector are a multiple of; also the coarser one never promises too much."""
        return self.align if self.offload.finer_suffix else self.scheduler_block_size

    @property
    def cacheable(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.prefix_cacheable)

    def spec_groups(self) -> tuple[SpecGroup, ...]:
        """Cacheable groups by equal spec, full attention first, else in the engine's order."""
        by_spec: dict[tuple[object, ...], list[Group]] = {}
        for group in self.cacheable:
            by_spec.setdefault(_spec_key(group), []).append(group)
        found = []
        for members in by_spec.values():
            rule = members[0].rule
            if rule is None:
                raise ValueError(f"{members[0].name} has no hit rule")
            found.append(SpecGroup(rule, tuple(members), any(member.eagle for member in members)))
        return tuple(sorted(found, key=lambda spec_group: spec_group.rule is not GroupRule.FULL))

    def as_dict(self) -> dict[str, object]:
        """The catalog as `/workers` shows it; what derives from an incomplete one is None."""
        whole = self.problem is None
        return {
            "groups": [msgspec.to_builtins(group) for group in self.groups],
            "hash_block_size": self.hash_block_size if whole else None,
            "scheduler_block_size": self.scheduler_block_size if whole else None,
            "align": self.align if whole else None,
            "partial_hits": self.partial_hits if whole else None,
            "blocks_per_chunk": self.blocks_per_chunk,
            "offload_connector": self.offload.connector,
            "problem": self.problem,
        }


def _spec_key(group: Group) -> tuple[object, ...]:
    if group.spec_class is not None:
        return ("class", group.spec_class)
    return (group.kind, group.block_size, group.sliding_window, group.attention_chunk_size)


def _problem_of(group: Group) -> str | None:
    if not group.prefix_cacheable:
        return None
    if group.block_size <= 0:
        return f"{group.name} has no block size yet: it is known only from placeholders or removals"
    if group.rule is None:
        return f"{group.name}: no hit rule for this kind, so no hit can be promised; it is served by load alone"
    if group.rule is GroupRule.SLIDING_WINDOW and not group.sliding_window:
        return f"{group.name} was announced without its window: register a catalog with sliding_window"
    if group.rule is GroupRule.CHUNKED_LOCAL and not group.attention_chunk_size:
        return f"{group.name}: its chunk size is not on the wire: register a catalog with attention_chunk_size"
    for size in (group.block_size, group.sliding_window or 0, group.attention_chunk_size or 0):
        if size > MAX_TOKENS:
            return f"{group.name} was announced with a size of {size} tokens; the most that is possible is {MAX_TOKENS}"
    if group.rule is GroupRule.CHUNKED_LOCAL and group.eagle:
        return f"{group.name}: chunked local attention with EAGLE is not defined in vLLM"
    return None


def _partial_hits(groups: tuple[Group, ...], hash_block_size: int) -> bool:
    """Whether hits may end inside a block. Source: kv_cache_utils.py:750, without DCP."""
    if len(groups) < 2 or not any(g.rule is GroupRule.MAMBA and g.block_size > hash_block_size for g in groups):
        return False
    return not any(
        g.rule in (GroupRule.SLIDING_WINDOW, GroupRule.CHUNKED_LOCAL) and g.block_size != hash_block_size
        for g in groups
        if g.prefix_cacheable
    )


def build_catalog(
    groups: Iterable[Group],
    source: str,
    spec: CatalogSpec,
    blocks_per_chunk: int | None = None,
    problem: str | None = None,
    evidence: TierEvidence = NO_EVIDENCE,
) -> Catalog:
    """The catalog of these groups, with all that vLLM derives; what `spec` states wins over what is derived."""
    offload = evidence.tier(
        spec.offload_connector, spec.offload_blocks_per_chunk is not None, spec.offload_partial_hits
    )
    ordered = tuple(sorted(groups, key=lambda g: -1 if g.group_idx is None else g.group_idx))
    cacheable = tuple(g for g in ordered if g.prefix_cacheable)
    chunk = spec.offload_blocks_per_chunk or blocks_per_chunk
    if problem is None and not cacheable:
        problem = "no KV cache group is known yet"
    if len(ordered) > MAX_GROUPS:
        problem = f"it names more than {MAX_GROUPS} KV cache groups, which no engine has: no hit can be promised"
        ordered = ordered[:MAX_GROUPS]
    for group in ordered:
        problem = problem or _problem_of(group)
    if problem is not None:
        return Catalog(ordered, source, problem, 0, 0, False, chunk, offload)
    hash_block_size = spec.hash_block_size or math.gcd(*(g.block_size for g in cacheable))
    scheduler_block_size = spec.scheduler_block_size or math.lcm(*(g.block_size for g in ordered if g.block_size > 0))
    for group in cacheable:
        if group.block_size % hash_block_size:
            problem = f"{group.name}: block size {group.block_size} is no multiple of hash_block_size {hash_block_size}"
    if scheduler_block_size % hash_block_size:
        problem = f"scheduler_block_size {scheduler_block_size} is no multiple of hash_block_size {hash_block_size}"
    if scheduler_block_size > MAX_TOKENS:
        problem = (
            f"its groups' block sizes have no common multiple up to {MAX_TOKENS} tokens; state scheduler_block_size"
        )
    if max(g.block_size for g in cacheable) * (chunk or 1) > MAX_TOKENS:
        problem = f"its offload tier was announced with chunks of {chunk} blocks, more than {MAX_TOKENS} tokens"
    partial = _partial_hits(ordered, hash_block_size) if spec.partial_hits is None else spec.partial_hits
    return Catalog(ordered, source, problem, hash_block_size, scheduler_block_size, partial, chunk, offload)


def _group_of(spec: GroupSpec) -> Group:
    fields = msgspec.structs.asdict(spec)
    return Group(**(fields | {"kind": spec.kind.lower()}))


class LearnedGroup(msgspec.Struct, frozen=True):
    """What events said of one group, as kept in Redis."""

    group_idx: int | None
    kind: str | None
    window: int | None
    block_sizes: list[int]
    problem: str | None
    # See `CatalogLearner.in_doubt`.
    doubtful: bool = False
    gpu_block_sizes: list[int] = []
    partial: bool = False


class LearnedCatalog(msgspec.Struct, frozen=True):
    """All that a `CatalogLearner` learned, as kept in Redis."""

    groups: list[LearnedGroup]
    blocks_per_chunk: int | None
    tier: TierEvidence = NO_EVIDENCE


class _Seen:
    """What events said of one group so far."""

    __slots__ = (
        "block_sizes",
        "gpu_block_sizes",
        "kind",
        "partial",
        "problem",
        "recent_sizes",
        "single_stores",
        "window",
    )

    def __init__(self) -> None:
        self.kind: str | None = None
        self.window: int | None = None
        self.block_sizes: set[int] = set()
        # Those that came since the group is in doubt.
        self.recent_sizes: set[int] = set()
        # Those of them that the GPU's events said.
        self.gpu_block_sizes: set[int] = set()
        self.problem: str | None = None
        # Whether entries inside its blocks were announced, and the hashes that show it.
        self.partial = False
        self.single_stores: set[int] = set()

    @property
    def stored(self) -> bool:
        """Whether a store said something of the group, not only a removal."""
        return self.kind is not None or bool(self.block_sizes)


class CatalogLearner:
    """Learns a worker's catalog from its events.

    Groups seen so far are taken for all there are; one that shows up later counts at once. A group known only from placeholders
    or removals, or one that contradicts itself, makes the catalog incomplete, until so many events came without another sign of it
    (ODD_EVENTS_FORGOTTEN_AFTER) that it was one odd event. `version` changes whenever the catalog does.
    """

    def __init__(self, spec: CatalogSpec | None = None) -> None:
        self._source = "configured"
        self._problem: str | None = None
        self.version = 0
        self._state(spec or CatalogSpec())
        self._seen: dict[int | None, _Seen] = {}
        self._life_is_whole = False
        # Groups of which it is not known yet whether their blocks are larger than what was announced.
        self._unsized: set[int | None] = set()
        # Events so far, and by group in doubt the number at which it is judged again.
        self._events = 0
        self._judged_at: dict[int | None, int] = {}
        self._blocks_per_chunk: int | None = None
        self._tier = NO_EVIDENCE
        # First blocks of prompts and their sizes, newest last: one alone on an offload tier shows that chunks are single blocks.
        self._roots: dict[int, int] = {}

    def _state(self, spec: CatalogSpec) -> None:
        self._spec = spec
        self._stated = {group.group_idx: _group_of(group) for group in spec.groups}
        self.version += 1

    def declare(self, spec: CatalogSpec, problem: str | None) -> None:
        """The engine itself says what its catalog is; problem: why no hit of it can be predicted all the same."""
        self._source, self._problem = "declared", problem
        self._state(spec)

    def begin_life(self) -> None:
        """Every event of the engine's life comes from here on, so that what none of them stored was never stored."""
        self._life_is_whole = True

    def miss_event(self) -> None:
        """An event could not be read."""
        self._life_is_whole = False

    @property
    def wants_parents(self) -> bool:
        """Whether `parent` may still teach something."""
        return self._life_is_whole and bool(self._unsized)

    def parent(self, event: BlockStored) -> None:
        """Learn from a GPU store of full attention, after `stored`, if it is a whole block or an entry inside one, as both come
        in the hash block size (vLLM 0.32 block_pool.py: cache_full_blocks, cache_partial_block). Whole blocks come several at a
        time, and each after its parent; the parent of an entry inside a block is stored by nobody."""
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

    @property
    def in_doubt(self) -> bool:
        """Odd events came, so that every event says something, also one that was seen before."""
        return bool(self._judged_at)

    def elapse(self, events: int) -> None:
        """So many events were taken."""
        self._events += events
        if self._judged_at:
            for group_idx in [group for group, at in self._judged_at.items() if at <= self._events]:
                self._judge(group_idx)

    def _doubt(self, group_idx: int | None) -> None:
        self._judged_at[group_idx] = self._events + ODD_EVENTS_FORGOTTEN_AFTER
        if group_idx in self._seen:
            self._seen[group_idx].recent_sizes.clear()

    def _judge(self, group_idx: int | None) -> None:
        """Nothing odd was said of a group for long enough: what was said since holds, and a group of which nothing was is none."""
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
        self.version += 1

    def _contradicts_names(self, group_idx: int | None) -> bool:
        """Engines name all their groups, or the one they have has no name."""
        known = (index for index, seen in self._seen.items() if seen.stored and index not in self._judged_at)
        return any((index is None) is not (group_idx is None) for index in known)

    def _hear_again(self, group_idx: int | None, seen: _Seen, block_size: int) -> None:
        """A store of a group in doubt."""
        if self._contradicts_names(group_idx) or (block_size <= 0 and not seen.stored):
            self._doubt(group_idx)
        elif seen.problem is None:
            # Only removals spoke of it, and now it shows that it is one.
            del self._judged_at[group_idx]
        elif block_size > 0 and len(seen.recent_sizes) < MAX_BLOCK_SIZES:
            seen.recent_sizes.add(block_size)

    def stored(self, event: BlockStored, *, shows_tier: bool = True) -> None:
        """Take what a Stored event says of its group, also when its hash list is empty.

        shows_tier: of another medium than the GPU, it has the shape in which its connector sent it."""
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
        """A removal names a group but says nothing of it."""
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
            # vLLM 0.20 to 0.23 drops the group of offload events: such a nameless tier is no group of its own.
            if group_idx is None and medium != GPU:
                return None
            # One over the limit is kept, and makes the catalog say so.
            if len(self._seen) > MAX_GROUPS:
                return None
            seen = self._seen[group_idx] = _Seen()
            self._unsized.add(group_idx)
            self.version += 1
            if self._contradicts_names(group_idx):
                self._doubt(group_idx)
        return seen

    def _learn_chunk(self, event: BlockStored, seen: _Seen) -> None:
        # A self-describing store names all blocks of its chunk; a partial tail has a smaller block size and no say here.
        # What a SimpleCPUOffloadConnector announces looks like chunks of one block, which its rule does not ask for.
        count = len(event.block_hashes)
        if seen.block_sizes and event.block_size == max(seen.block_sizes) and count > (self._blocks_per_chunk or 0):
            self._blocks_per_chunk = count
            self.version += 1

    @property
    def wants_roots(self) -> bool:
        """Whether `root` may still teach something."""
        return self._blocks_per_chunk is None

    def root(self, event: BlockStored) -> None:
        """Remember the first block of a prompt. Only full attention announces blocks without leaving any out."""
        if event.parent_block_hash is None and len(event.block_hashes) and event.kind in FULL_KINDS:
            self._roots[int(event.block_hashes[0])] = event.block_size
            if len(self._roots) > MAX_ROOTS:
                del self._roots[next(iter(self._roots))]

    def _judge_placeholder(self, event: BlockStored, seen: _Seen | None) -> None:
        # A chunk is known by its last block, so a chunk that ends with the first block of its group is that block alone.
        if self._blocks_per_chunk is not None or seen is None or not seen.block_sizes:
            return
        size = max(seen.block_sizes)
        if any(self._roots.get(int(block_hash)) == size for block_hash in event.block_hashes):
            self._blocks_per_chunk = 1
            self.version += 1

    def catalog(self, hash_block_size: int | None = None) -> Catalog:
        """The catalog as known now: stated groups first, learned ones beside them.

        hash_block_size: what verified hashes showed, for an engine whose prefix_match_unit is finer than the gcd.
        """
        spec = self._spec
        if spec.hash_block_size is None and hash_block_size is not None:
            spec = msgspec.structs.replace(spec, hash_block_size=hash_block_size)
        problem = self._problem
        groups = dict(self._stated)
        # Entries inside blocks are there for a Mamba state's sake.
        partial = any(seen.partial for seen in self._seen.values()) and any(
            seen.kind == "mamba" for seen in self._seen.values()
        )
        if partial and spec.partial_hits is None:
            spec = msgspec.structs.replace(spec, partial_hits=True)
        sizes = [min(seen.block_sizes) for seen in self._seen.values() if seen.block_sizes]
        finest = spec.hash_block_size or min(sizes, default=0)
        for group_idx, seen in self._seen.items():
            if group_idx in self._stated:
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
        source = self._source if self._stated and self._stated.keys() >= groups.keys() else "learned"
        return build_catalog(groups.values(), source, spec, self._blocks_per_chunk, problem, self._tier)

    def dump(self) -> bytes:
        """What was learned, for another process of the router; read back by `load`."""
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
            )
            for index, seen in self._seen.items()
        ]
        return msgspec.json.encode(LearnedCatalog(groups, self._blocks_per_chunk, self._tier))

    def load(self, dumped: bytes) -> None:
        """Take over what `dump` wrote. Raises msgspec.DecodeError on anything else."""
        learned = msgspec.json.decode(dumped, type=LearnedCatalog)
        for group in learned.groups:
            seen = self._seen[group.group_idx] = _Seen()
            seen.kind, seen.window, seen.problem = group.kind, group.window, group.problem
            seen.block_sizes = set(group.block_sizes)
            if group.doubtful or group.problem is not None:
                self._doubt(group.group_idx)
            seen.gpu_block_sizes = set(group.gpu_block_sizes)
            seen.partial = group.partial
        self._tier = learned.tier
        self._blocks_per_chunk = learned.blocks_per_chunk
        self.version += 1


def _size_problem(group_idx: int | None, sizes: set[int], finest: int) -> str | None:
    """A group has one block size; partial entries come in the hash block size, the finest of all."""
    if len(sizes) <= 1 or sizes == {max(sizes), finest}:
        return None
    return f"group {group_idx} contradicts itself: announced with block sizes {sorted(sizes)}"
