# SPDX-License-Identifier: Apache-2.0
"""The KV connectors of engines: which hit rule each of them has, and which connector a worker's events show.

A tier beside the GPU earns credit only if its connector is known and has a rule. The engine patch declares the
connector, the user states it, or the router learns it from the shape of the tier's events (`docs/reference/wire.md`
lists these shapes). Events that another connector could have sent teach nothing, and events of two connectors end the
credit. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import msgspec

from kvrouter.contract.tiers import MEDIA
from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.base.common.ids import CPU, STORAGE, Place

OFFLOADING = "OffloadingConnector"
SIMPLE_CPU = "SimpleCPUOffloadConnector"
# SGLang's host tier, which is not a connector of vLLM.
HICACHE = "HiCache"

# The owner of this project's disk tier (engine_patch/offload). No other disk tier of an OffloadingConnector publishes
# its removals.
DISK_OWNER = "kvrouter"

# Connectors that only hand over what another engine computed for the same request, and keep nothing for other requests.
HAND_OVER_ONLY = frozenset(
    {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
)

LOCAL = "LOCAL"


class TierRule(Enum):
    """The way in which an engine looks up a prompt in its tiers; the values are names of connectors."""

    # The engine looks up whole chunks, group by group.
    CHUNKS = OFFLOADING
    # vLLM's own coordinator judges the part of the prompt after the local hit.
    SUFFIX = SIMPLE_CPU
    # A block counts if it is on the GPU or on the CPU.
    JOINT = HICACHE


RULES = {rule.value: rule for rule in TierRule}


class OffloadTier(msgspec.Struct, frozen=True):
    """The tiers of a worker beside its GPU: their connector, and the rule for their hits.

    Invariant: if `rule` is None, the tiers earn no credit, and `problem` gives the reason.
    """

    connector: str | None
    rule: TierRule | None
    problem: str
    # Whether hits of a SimpleCPUOffloadConnector may end wherever those of the GPU may. In its lazy mode they may not.
    finer_suffix: bool = False

    def earning(self, places: Collection[Place]) -> frozenset[tuple[str, str | None]]:
        """Return medium and owner of each tier in `places` that earns credit."""
        tiers = {(place.medium, place.ownership) for place in places}
        if self.rule is TierRule.CHUNKS:
            return frozenset(tiers & {(CPU, None), (STORAGE, DISK_OWNER)})
        if self.rule is TierRule.JOINT:
            return frozenset(tiers & {(CPU, None)})
        own_tiers = tiers & {(CPU, None), (STORAGE, None)}
        # A SimpleCPUOffloadConnector keeps its blocks on one medium, so a second medium belongs to another connector.
        return frozenset(own_tiers if self.rule is TierRule.SUFFIX and len(own_tiers) == 1 else ())

    def withheld(self, places: Collection[Place]) -> str:
        """Return the reason why some of `places` earn no credit, or "" if all of them do."""
        earning = self.earning(places)
        for medium, owner in sorted({(p.medium, p.ownership or "") for p in places if p.medium in MEDIA[1:]}):
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
    """Return the connector whose rule holds for an engine with these connectors, or None if the engine has none.

    A MultiConnector takes what the first of its connectors offers, however little. So the rule of a connector that
    keeps a tier holds only if all others merely hand over. For any other combination, return its names as one text,
    which has no rule.

    Args:
        names: The names of the engine's connectors, the outermost first.
    """
    inner = [name for name in names if name != "MultiConnector"]
    tiers = [name for name in inner if name not in HAND_OVER_ONLY]
    if len(tiers) == 1 and tiers[0] in RULES:
        return tiers[0]
    return " with ".join(inner) or (names[0] if names else None)


class TierEvidence(msgspec.Struct, frozen=True):
    """The facts that the tier events of a worker have shown so far, as stored in Redis."""

    # The connector that the events show, None if they show none yet.
    connector: str | None = None
    # Why the events fit no connector with a rule, or "".
    conflict: str = ""
    # See `OffloadTier.finer_suffix`.
    finer_suffix: bool = False

    def add(self, event: BlockStored, gpu_block_sizes: Collection[int]) -> TierEvidence:
        """Return the evidence with one more event; the same object if the event shows nothing new.

        Args:
            event: A Stored event of another medium than the GPU.
            gpu_block_sizes: The block sizes that events of the GPU announced for the event's group.
        """
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
        """Return the worker's tier by this evidence and the stated values, which override the evidence.

        Args:
            stated: The stated connector, or None.
            stated_chunk: Whether a chunk size is stated, which only an OffloadingConnector has.
            finer_suffix: The stated value of `OffloadTier.finer_suffix`, or None.
        """
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
    """Return the connector that sends such an event.

    The result is a key of RULES, or a sentence if only connectors without a rule send such events. It is None if
    several connectors may have sent the event.

    Sources: vLLM 0.24 to 0.33 kv_connector/v1/offloading/events.py, v1/simple_kv_offload/manager.py (since 0.30),
    mooncake/store/worker.py, umbp/scheduler.py, lmcache_connector.py; v1/core/single_type_kv_cache_manager.py
    (HiSparse).
    """
    if event.ownership == DISK_OWNER:
        return OFFLOADING
    # On disk, events of a SimpleCPUOffloadConnector and of the fs tier of an OffloadingConnector look the same.
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
    # HiSparse announces a group's host pool in the same form, but it never has that group on the GPU.
    if event.locality is None and event.block_size in gpu_block_sizes:
        return OFFLOADING
    return None
