# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups of a worker, and the geometry that vLLM derives from them.

The user or the engine patch states a catalog, or the router learns it from events; a stated value overrides a learned
one. A catalog does not depend on blocks, hits or Redis. An incomplete catalog gives the reason in `problem` and earns no
credit.

Sources: vLLM 0.32.0 v1/core/kv_cache_utils.py:750 (partial hits), :804 (block sizes),
v1/core/kv_cache_coordinator.py:708 (spec groups), v1/kv_cache_interface.py:146 (kinds).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import msgspec

from kvrouter.router.model.kvcache.offload_connectors import OffloadTier, TierEvidence
from kvrouter.router.model.workers.hash_algorithms import LOOKAHEAD_TOKENS
from kvrouter.router.model.workers.registration import MAX_GROUPS, MAX_TOKENS, CatalogSpec, GroupSpec


class GroupRule(Enum):
    """The floor function that judges a group; the values are the codes in the rule's tables."""

    FULL = 0
    SLIDING_WINDOW = 1
    CHUNKED_LOCAL = 2
    MAMBA = 3


# Keys are KVCacheSpecKind of vLLM 0.32.0. cross_attention, encoder_only_attention and unknown have no rule, because
# vLLM turns prefix caching off for them.
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


NO_EVIDENCE = TierEvidence()


class Group(GroupSpec, frozen=True):
    """One KV cache group as the hit rule sees it: the stated or learned fields, and the rule that its kind implies."""

    @property
    def rule(self) -> GroupRule | None:
        """The rule of the group's kind, or None if no hit can be promised for this kind."""
        return RULE_OF_KIND.get(self.kind)

    @property
    def name(self) -> str:
        """The group's number and kind, for messages."""
        index = "the unnamed group" if self.group_idx is None else f"group {self.group_idx}"
        return f"{index} ({self.kind})"


class SpecGroup(msgspec.Struct, frozen=True):
    """Groups of equal spec, which are looked up jointly: a block counts only if it is resident in all of them."""

    rule: GroupRule
    members: tuple[Group, ...]
    eagle: bool

    @property
    def first(self) -> Group:
        """One member, for the fields that all members share."""
        return self.members[0]


class Catalog(msgspec.Struct, frozen=True):
    """The facts about one worker's KV cache that the hit rule needs. All sizes are in tokens.

    Invariant: when `problem` is None, every cacheable group has a rule and a block size that hash_block_size divides.
    """

    groups: tuple[Group, ...]
    # "configured", "declared" (by the engine patch) or "learned" (from events).
    source: str
    # The reason why no hit can be predicted, or None if the catalog is complete.
    problem: str | None
    hash_block_size: int
    scheduler_block_size: int
    # Whether a hit may end inside a block.
    partial_hits: bool
    # Number of blocks of a group that the offload tier stores and loads as one chunk, or None while it is not known.
    blocks_per_chunk: int | None
    offload: OffloadTier
    # Whether a hit needs as many resident tokens before its end as the sliding window has; otherwise one less suffices.
    whole_windows: bool = False
    # Tokens after a block that its hash covers too. The last `lookahead_tokens` of a prompt are never part of a hit.
    lookahead_tokens: int = 0

    @property
    def align(self) -> int:
        """The number of tokens that every hit is a multiple of.

        Source: kv_cache_coordinator.py:672 (hybrid), :466 (one group).
        """
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @property
    def suffix_align(self) -> int:
        """The number of tokens that every hit of a SimpleCPUOffloadConnector is a multiple of.

        It is the coarser size unless `finer_suffix` is certain: the coarser size never promises too much.
        """
        return self.align if self.offload.finer_suffix else self.scheduler_block_size

    @property
    def cacheable(self) -> tuple[Group, ...]:
        """The groups that take part in prefix caching, in the engine's order."""
        return tuple(group for group in self.groups if group.prefix_cacheable)

    def spec_groups(self) -> tuple[SpecGroup, ...]:
        """Return the cacheable groups joined by equal spec, full attention first, otherwise in the engine's order.

        Raises ValueError if a group has no rule, which `problem` reports beforehand.
        """
        by_spec: dict[tuple[object, ...], list[Group]] = {}
        for group in self.cacheable:
            by_spec.setdefault(_spec_key(group), []).append(group)
        spec_groups = []
        for members in by_spec.values():
            rule = members[0].rule
            if rule is None:
                raise ValueError(f"{members[0].name} has no hit rule")
            spec_groups.append(SpecGroup(rule, tuple(members), any(member.eagle for member in members)))
        return tuple(sorted(spec_groups, key=lambda spec_group: spec_group.rule is not GroupRule.FULL))

    def as_dict(self) -> dict[str, object]:
        """Return the catalog as `/workers` shows it; derived values are None while the catalog is incomplete."""
        complete = self.problem is None
        return {
            "groups": [msgspec.to_builtins(group) for group in self.groups],
            "hash_block_size": self.hash_block_size if complete else None,
            "scheduler_block_size": self.scheduler_block_size if complete else None,
            "align": self.align if complete else None,
            "partial_hits": self.partial_hits if complete else None,
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
    """Return whether hits may end inside a block. Source: kv_cache_utils.py:750, without DCP."""
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
    """Return the catalog of these groups, with every value that vLLM derives from them.

    Args:
        groups: The worker's groups in any order.
        source: Where the groups come from, see `Catalog.source`.
        spec: Stated values; each of them overrides the derived one.
        blocks_per_chunk: The learned chunk size of the offload tier, None if it is not known.
        problem: A reason, found earlier, why no hit can be predicted; None if there is none.
        evidence: What the events of the offload tier showed of its connector.
    """
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
            problem = (
                f"{group.name}: block size {group.block_size} is not a multiple of hash_block_size {hash_block_size}"
            )
    if scheduler_block_size % hash_block_size:
        problem = f"scheduler_block_size {scheduler_block_size} is not a multiple of hash_block_size {hash_block_size}"
    if scheduler_block_size > MAX_TOKENS:
        problem = (
            f"its groups' block sizes have no common multiple up to {MAX_TOKENS} tokens; state scheduler_block_size"
        )
    if max(g.block_size for g in cacheable) * (chunk or 1) > MAX_TOKENS:
        problem = f"its offload tier was announced with chunks of {chunk} blocks, more than {MAX_TOKENS} tokens"
    partial = _partial_hits(ordered, hash_block_size) if spec.partial_hits is None else spec.partial_hits
    return Catalog(
        ordered,
        source,
        problem,
        hash_block_size,
        scheduler_block_size,
        partial,
        chunk,
        offload,
        spec.whole_windows,
        LOOKAHEAD_TOKENS.get(spec.hash_algo or "", 0),
    )


def group_of(spec: GroupSpec) -> Group:
    """Return a stated group as a `Group`, with its kind in lower case."""
    fields = msgspec.structs.asdict(spec)
    return Group(**(fields | {"kind": spec.kind.lower()}))
