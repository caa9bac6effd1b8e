# SPDX-License-Identifier: Apache-2.0
"""A question to the index and its answer, as every layer from the API to the matcher sees them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.hits import GroupCover, HeldRuns, HitLimit
from kvrouter.router.base.common.errors import UnknownWorker
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.model.kvcache.block_hash import HashSpace
from kvrouter.router.model.kvcache.catalog import GroupRule
from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher

# Hashing takes 20 ns a token, so a prompt of this length takes half as long to hash as the other work for which one
# question may hold the event loop.
LONG_PROMPT_TOKENS = 65_536


class Question(msgspec.Struct, frozen=True, gc=False):
    """The question how many tokens of a prompt each worker of `model` would reuse.

    Invariant: exactly one of `token_ids` and `block_hashes` is given.
    """

    model: str
    # The prompt's length, also if only its hashes or its first tokens are known.
    num_tokens: int
    # From the first token on, int64.
    token_ids: NDArray[np.int64] | None = None
    # From block 0 on, at the hash block size, uint64.
    block_hashes: NDArray[np.uint64] | None = None
    # The images, sounds and videos among the token_ids.
    items: Items = ()
    lora_name: str | None = None
    cache_salt: str | None = None
    # The only workers to answer for, None for all.
    worker_ids: frozenset[str] | None = None
    exclude_worker_ids: frozenset[str] = frozenset()
    # Workers of which only this data-parallel rank is excluded, because the request failed there.
    exclude_workers: frozenset[WorkerKey] = frozenset()
    # The only data-parallel rank of each worker to answer for, None for all.
    dp_rank: int | None = None
    # Whether the answer says how far each group alone would let a worker reach.
    explain: bool = False
    # Whether the answer says where each block of the prompt lies.
    held: bool = False
    # Kinds of engines that reuse nothing, because the request wants a result that needs the whole prompt computed.
    without_cache: frozenset[str] = frozenset()
    # Whether the engine gets another body than the one from which the tokens were made, so that they are a guess.
    is_guess: bool = False
    # The hashes that were made before the match (`Matcher.hash_steps`), by hash space.
    hashers: dict[HashSpace, PromptHasher] = {}
    # The number of prompts in the request. If there are several, `num_tokens` is their sum, the question itself has no
    # tokens, and its hits are the sums over `parts`.
    num_prompts: int = 1
    # The prompts of a list that are looked up, each with its own tokens; the last one is the list's last prompt.
    parts: tuple[Question, ...] = ()
    # Whether the length of the list's other prompts is exact.
    others_counted: bool = False

    @property
    def is_long(self) -> bool:
        """Whether its tokens are hashed in turns, so that others are answered meanwhile."""
        if self.token_ids is None:
            return bool(self.parts)
        return len(self.token_ids) >= LONG_PROMPT_TOKENS

    @property
    def is_blind(self) -> bool:
        """Whether nothing is known of the prompt but its length, so that hits say nothing."""
        if self.token_ids is not None or (self.block_hashes is not None and len(self.block_hashes)):
            return False
        return all(part.is_blind for part in self.parts)

    @property
    def known_tokens(self) -> int | None:
        """The number of tokens whose ids are known; None if only their hashes are."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.parts:
            return sum(part.known_tokens or 0 for part in self.parts)
        return 0 if self.is_blind else None

    @property
    def is_whole(self) -> bool:
        """Whether the ids of all tokens are known."""
        return self.known_tokens == self.num_tokens

    @property
    def is_counted(self) -> bool:
        """Whether the length is exact; for a list, whether that of every prompt is."""
        return self.is_whole or (self.others_counted and all(part.is_whole for part in self.parts))


class Limiter(msgspec.Struct, frozen=True, array_like=True):
    """The group that keeps a GPU hit from being longer."""

    group_idx: int | None
    kind: str
    rule: GroupRule
    # The tokens of its window or chunk, 0 if it has none.
    span_tokens: int
    # Why blocks beside the GPU, which might reach further, earn nothing; empty if none are withheld.
    withheld: str

    def limit(self, hit_tokens: int) -> HitLimit:
        """Return why this group ends the hit at `hit_tokens` tokens."""
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
    """The tokens of a prompt that one worker would not compute again.

    Invariant: `by_tier` never falls.
    """

    worker: WorkerKey
    # The tokens with each of TIERS and those before it.
    by_tier: tuple[int, ...]
    state: str
    # Why credit is withheld or reduced; empty if it is not.
    reason: str = ""
    limiter: Limiter | None = None
    # How far full attention's blocks on the GPU alone would reach. This breaks ties, and is the hit of policy
    # full_attention_only.
    full_attention: int = 0
    # Whether the hit is a guess from the prompts that were sent there.
    approximate: bool = False
    # How far each group alone would let the worker reach, if the question wants an explanation.
    groups: tuple[GroupCover, ...] = ()
    # Where the prompt's blocks lie, if the question wants to know.
    held: tuple[HeldRuns, ...] = ()
    # The hit of a list's last prompt in tokens, over all tiers; None for one prompt, or if it is not known.
    last_tokens: int | None = None
    # The sources from which the worker may fetch blocks, the one with the most tokens first. The tokens that they add are no
    # part of `by_tier`: a source may evict a block before it is fetched.
    pulls: tuple[Pull, ...] = ()

    @property
    def on_gpu(self) -> int:
        """The tokens that need not be loaded."""
        return self.by_tier[0]

    @property
    def tokens(self) -> int:
        """The tokens with all tiers."""
        return self.by_tier[-1]

    @property
    def limited_by(self) -> HitLimit | None:
        """The limit that keeps the hit from being longer, None if there is none or nothing is known of the worker."""
        return None if self.limiter is None else self.limiter.limit(self.on_gpu)


def filter_hits(hits: Sequence[Hit], question: Question) -> Sequence[Hit]:
    """Return the hits of the workers that the question does not exclude.

    Raises UnknownWorker if the question names a worker that does not exist.
    """
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
