# SPDX-License-Identifier: Apache-2.0
"""The parts of a hit: the tokens of a prompt that a worker would not compute again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from kvrouter.contract import fields
from kvrouter.contract.tiers import TIERS

GroupIdx = Annotated[int | None, Meta(description="number of the KV cache group; null: the engine names none")]
GroupKind = Annotated[str, Meta(description="vLLM's kind of the KV cache group")]


class Overlap(msgspec.Struct, frozen=True):
    """The tokens that would not be computed again, by tier. Each tier includes those before it."""

    longest_matched: Annotated[int, Meta(description="tokens reused with all tiers; equals the last tier")]
    if TYPE_CHECKING:
        gpu: int
        cpu: int
        disk: int
    else:
        __annotations__.update({tier.name: Annotated[int, Meta(description=tier.meaning)] for tier in TIERS})
    dp: Annotated[dict[str, int], Meta(description="the longest match by data-parallel rank, in tokens")]


class GroupCover(msgspec.Struct, frozen=True):
    """The GPU hit that one KV cache group alone would allow."""

    group_idx: GroupIdx
    kind: GroupKind
    covered: Annotated[int, Meta(description="tokens up to which this group alone would let the GPU hit reach")]


class HitLimit(msgspec.Struct, frozen=True):
    """The group that kept the hit from being longer."""

    group_idx: GroupIdx
    kind: GroupKind
    why: Annotated[str, Meta(description="what is missing there, as a sentence")]


class PeerHit(msgspec.Struct, frozen=True):
    """The hit of a worker with the blocks that it may fetch from another worker."""

    worker_id: Annotated[str | int, Meta(description="the source: the worker that lends the blocks")]
    dp_rank: fields.DpRank
    tokens: Annotated[
        int,
        Meta(
            description="tokens reused if all blocks arrive, with the worker's own tiers; no part of longest_matched, as the "
            "source may evict a block before it is fetched"
        ),
    ]


class HeldRuns(msgspec.Struct, frozen=True):
    """The blocks of a prompt that one place holds."""

    group_idx: GroupIdx
    medium: Annotated[str, Meta(description="GPU, CPU, STORAGE or another")]
    owner: Annotated[str | None, Meta(description="who holds the blocks of a secondary tier")]
    block_size: Annotated[int, Meta(description="tokens in a block of this place")]
    runs: Annotated[
        tuple[tuple[int, int], ...], Meta(description="runs of tokens, [first, end), ascending, with gaps between them")
    ]
