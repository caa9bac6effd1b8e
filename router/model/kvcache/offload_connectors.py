# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connectors: which rule decides what a worker reuses from the tiers beside its GPU, and which connector its
events show.

A tier earns credit only where its connector is known and has a rule. It is declared by the engine patch, stated by the
user, or learned from the shape of the tier's events (`docs/reference/wire.md` lists them); events that another
connector could have sent teach nothing, and events of two connectors end the credit. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import msgspec

from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.base.common.ids import CPU, STORAGE, Place

OFFLOADING = "OffloadingConnector"
SIMPLE_CPU = "SimpleCPUOffloadConnector"
# SGLang's host tier; no connector of vLLM's.
HICACHE = "HiCache"

# Owner of this project's disk tier (engine_patch/offload), the one tier of an OffloadingConnector on disk whose
# removals are published.
DISK_OWNER = "kvrouter"

# They bring what another engine computed for the same request, and nothing to any other request.
HAND_OVER_ONLY = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)

LOCAL = "LOCAL"


class TierRule(Enum):
    """How the engine looks up what its tiers hold."""

    # Whole chunks, group by group.
    CHUNKS = OFFLOADING
    # vLLM's own coordinator over the part of the prompt behind the local hit.
    SUFFIX = SIMPLE_CPU
    # A block counts on either of GPU and CPU.
    JOINT = HICACHE


RULES = {rule.value: rule for rule in TierRule}


class OffloadTier(msgspec.Struct, frozen=True):
    """What is known of a worker's connector. rule None: its tiers earn nothing, and `problem` says why.

    finer_suffix: a SimpleCPUOffloadConnector's hits may end wherever the GPU's may; it is not so in its lazy mode.
    """

    connector: str | None
    rule: TierRule | None
    problem: str
    finer_suffix: bool = False

    def earning(self, places: Collection[Place]) -> frozenset[tuple[str, str | None]]:
        """(medium, owner) of the tiers in `places` that earn credit."""
        tiers = {(place.medium, place.ownership) for place in places if place.medium in (CPU, STORAGE)}
        if self.rule is TierRule.CHUNKS:
            return frozenset(tiers & {(CPU, None), (STORAGE, DISK_OWNER)})
        if self.rule is TierRule.JOINT:
            return frozenset(tiers & {(CPU, None)})
        own = tiers & {(CPU, None), (STORAGE, None)}
        # A SimpleCPUOffloadConnector keeps its blocks on one medium; a second one is another connector's.
        return frozenset(own if self.rule is TierRule.SUFFIX and len(own) == 1 else ())

    def withheld(self, places: Collection[Place]) -> str:
        """Why some of `places` earn no credit; empty when nothing is withheld."""
        earning = self.earning(places)
        for medium, owner in sorted({(p.medium, p.ownership or "") for p in places if p.medium in (CPU, STORAGE)}):
            if (medium, owner or None) not in earning:
                whose = f" of {owner}" if owner else ""
                return (
                    self.problem
                    or f"blocks on {medium}{whose} earn no credit: nothing proves that removals are published"
                )
        return ""


UNKNOWN = OffloadTier(
    None,
    None,
    "its events do not show yet which KV connector keeps its blocks on CPU or disk, so they earn no credit: load the "
    "engine patch there, or state offload_connector",
)


def effective_connector(names: Sequence[str]) -> str | None:
    """The connector whose rule holds for an engine with these connectors, outermost first; None where it has none.

    A MultiConnector takes what the first of its connectors offers, however little, so one that keeps a tier has its own
    rule only where the others offer nothing of their own.
    """
    inner = [name for name in names if name != "MultiConnector"]
    tiers = [name for name in inner if name not in HAND_OVER_ONLY]
    if len(tiers) == 1 and tiers[0] in RULES:
        return tiers[0]
    return " with ".join(inner) or (names[0] if names else None)


class TierEvidence(msgspec.Struct, frozen=True):
    """What the tier events of a worker showed so far, as kept in Redis."""

    connector: str | None = None
    conflict: str = ""
    finer_suffix: bool = False

    def add(self, event: BlockStored, gpu_block_sizes: Collection[int]) -> TierEvidence:
        """Take a Stored event of another medium than GPU. gpu_block_sizes: what the GPU's events said of its group."""
        if self.conflict or not len(event.block_hashes):
            return self
        shown = shown_connector(event, gpu_block_sizes)
        if shown is None:
            return self
        finer = self.finer_suffix or (shown == SIMPLE_CPU and event.parent_block_hash is not None)
        if shown not in RULES:
            return TierEvidence(self.connector, shown)
        if self.connector not in (None, shown):
            return TierEvidence(
                self.connector, f"its events on CPU or disk are those of {self.connector} and of {shown}"
            )
        return self if (shown, finer) == (self.connector, self.finer_suffix) else TierEvidence(shown, "", finer)

    def tier(self, stated: str | None, stated_chunk: bool, finer_suffix: bool | None) -> OffloadTier:
        """With what is stated; the chunk size is one of an OffloadingConnector's alone."""
        connector = stated or self.connector or (OFFLOADING if stated_chunk else None)
        if connector is None and not self.conflict:
            return UNKNOWN
        problem = self.conflict
        if not problem and self.connector not in (None, connector):
            problem = f"its events on CPU or disk are those of {self.connector}, not of {connector} as stated"
        if not problem and connector not in RULES:
            problem = f"no hit rule is known for what {connector} keeps on CPU or disk"
        if problem:
            return OffloadTier(connector, None, f"{problem}; it earns no credit")
        finer = self.finer_suffix if finer_suffix is None else finer_suffix
        return OffloadTier(connector, RULES[connector or ""], "", finer)


def shown_connector(event: BlockStored, gpu_block_sizes: Collection[int]) -> str | None:
    """The connector that sends such an event: a name of RULES, a sentence about others, None if it is ambiguous.

    Sources: vLLM 0.24 to 0.33 kv_connector/v1/offloading/events.py, v1/simple_kv_offload/manager.py (since 0.30),
    mooncake/store/worker.py, umbp/scheduler.py, lmcache_connector.py; v1/core/single_type_kv_cache_manager.py
    (HiSparse).
    """
    if event.ownership == DISK_OWNER:
        return OFFLOADING
    # On disk, a SimpleCPUOffloadConnector and the fs tier of an OffloadingConnector look the same.
    if event.medium != CPU or event.ownership is not None:
        return None
    if event.block_size == 0 and event.locality is None:
        return OFFLOADING
    if event.kind is None:
        return (
            f"blocks on {event.medium} were announced as only connectors without a hit rule do (block size, but no kind: "
            "MooncakeStore, LMCache, UMBP)"
        )
    if event.locality == LOCAL and len(event.block_hashes) == 1:
        return SIMPLE_CPU
    # HiSparse announces a group's host pool like this, but never has that group on the GPU.
    if event.locality is None and event.block_size in gpu_block_sizes:
        return OFFLOADING
    return None
