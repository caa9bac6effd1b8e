# SPDX-License-Identifier: Apache-2.0
"""A question to the index and its answer, as every layer from the API to the matcher sees them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import UnknownWorker
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.held_runs import HeldRuns
from kvrouter.router.model.kvcache.block_hash import HashSpace
from kvrouter.router.model.kvcache.catalog import GroupRule
from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher

# Hashing takes 20 ns a token: half as long as what else one question may hold the loop for.
LONG_PROMPT_TOKENS = 65_536


class Question(msgspec.Struct, frozen=True, gc=False):
    """How many tokens of this prompt would each worker of `model` reuse?

    Exactly one of `token_ids` (int64, from the first on) and `block_hashes` (uint64, at the hash block size, from block
    0) is given. num_tokens is the prompt's length, also when only its hashes or its first tokens are known. items: the
    images and the like among the token_ids.
    """

    model: str
    num_tokens: int
    token_ids: NDArray[np.int64] | None = None
    block_hashes: NDArray[np.uint64] | None = None
    items: Items = ()
    lora_name: str | None = None
    cache_salt: str | None = None
    worker_ids: frozenset[str] | None = None
    exclude_worker_ids: frozenset[str] = frozenset()
    # Exactly these ranks: the request failed there.
    exclude_workers: frozenset[WorkerKey] = frozenset()
    # Only this data-parallel rank of each worker.
    dp_rank: int | None = None
    explain: bool = False
    # Whether the answer says where each block of the prompt lies.
    held: bool = False
    # Kinds of engines that reuse nothing for it: the request wants what needs the whole prompt computed.
    without_cache: frozenset[str] = frozenset()
    # As far as the prompt was hashed before it is matched (`Matcher.hash_steps`).
    hashers: dict[HashSpace, PromptHasher] = {}

    @property
    def is_long(self) -> bool:
        """Whether its tokens are hashed in turns, so that others are answered meanwhile."""
        return self.token_ids is not None and len(self.token_ids) >= LONG_PROMPT_TOKENS

    @property
    def is_blind(self) -> bool:
        """Whether nothing is known of the prompt but its length, so that hits say nothing."""
        return self.token_ids is None and (self.block_hashes is None or not len(self.block_hashes))


class GroupCover(msgspec.Struct, frozen=True):
    """How far one KV cache group alone would let the GPU hit reach, in tokens."""

    group_idx: int | None
    kind: str
    covered: int


class HitLimit(msgspec.Struct, frozen=True):
    """The group that kept the deepest hit from being longer, and a sentence why."""

    group_idx: int | None
    kind: str
    why: str


class Limiter(msgspec.Struct, frozen=True, array_like=True):
    """The group that keeps a GPU hit from being longer. span_tokens: its window or chunk, 0 where it has none.
    withheld: why blocks beside the GPU, which might reach further, earn nothing; empty if none are withheld."""

    group_idx: int | None
    kind: str
    rule: GroupRule
    span_tokens: int
    withheld: str

    def limit(self, hit_tokens: int) -> HitLimit:
        """What it does to a hit of this length."""
        if self.rule is GroupRule.FULL:
            why = f"its unbroken run of blocks on the GPU ends at {hit_tokens} tokens"
        elif self.rule is GroupRule.SLIDING_WINDOW:
            why = f"at no boundary past {hit_tokens} tokens are the blocks of its window ({self.span_tokens} tokens) all on the GPU"
        elif self.rule is GroupRule.MAMBA:
            why = f"it has no state on the GPU at a boundary past {hit_tokens} tokens"
        else:
            why = f"the blocks of its chunk ({self.span_tokens} tokens) are not all on the GPU past {hit_tokens} tokens"
        return HitLimit(self.group_idx, self.kind, f"{why}; {self.withheld}" if self.withheld else why)


class Hit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of the prompt that one worker would not compute again; cumulative, so gpu <= cpu <= disk.

    `reason` says why credit is withheld or reduced, and is empty when nothing is. groups: of a question that wants
    an explanation. approximate: a guess from what was sent there.
    """

    worker: WorkerKey
    gpu: int
    cpu: int
    disk: int
    state: str
    reason: str = ""
    groups: tuple[GroupCover, ...] = ()
    limiter: Limiter | None = None
    approximate: bool = False
    # How far full attention's blocks on the GPU alone would reach: breaks ties, and is the hit of policy
    # full_attention_only.
    full_attention: int = 0
    # Of a question that wants to know: where the prompt's blocks lie.
    held: tuple[HeldRuns, ...] = ()

    @property
    def limited_by(self) -> HitLimit | None:
        """What keeps it from being longer, None where nothing does or nothing is known of the worker."""
        return None if self.limiter is None else self.limiter.limit(self.gpu)


def filter_hits(hits: Sequence[Hit], question: Question) -> Sequence[Hit]:
    """The hits of workers that the question does not exclude. Raises UnknownWorker for one that it names and that does
    not exist."""
    only, without, rank = question.worker_ids, question.exclude_worker_ids, question.dp_rank
    if only is not None:
        missing = only - {hit.worker.worker_id for hit in hits}
        if missing:
            raise UnknownWorker(
                f"not registered for model {question.model!r}: {', '.join(map(printable, sorted(missing)))}"
            )
        hits = [hit for hit in hits if hit.worker.worker_id in only]
    if rank is not None:
        hits = [hit for hit in hits if hit.worker.dp_rank == rank]
    if without:
        hits = [hit for hit in hits if hit.worker.worker_id not in without]
    if question.exclude_workers:
        hits = [hit for hit in hits if hit.worker not in question.exclude_workers]
    return hits
