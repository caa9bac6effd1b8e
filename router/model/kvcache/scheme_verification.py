# SPDX-License-Identifier: Apache-2.0
"""The hash scheme that a worker uses: assumed at first, then verified or refuted by the blocks that it announces.

With a wrong assumption no hash is found, so the predicted hits can only be too small. Pure. The schemes are in
`block_hash.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.base.common.ids import GPU
from kvrouter.router.model.kvcache.block_hash import (
    HashScheme,
    KeysUnknown,
    SchemeUnexplained,
    SchemeVerified,
    Verdict,
    verify_scheme,
)
from kvrouter.router.model.workers.hash_algorithms import LOOKAHEAD_TOKENS
from kvrouter.router.model.workers.registration import CatalogSpec

# How many root blocks are judged before the router gives up on a worker that no scheme explains. A judgement costs up
# to 20 ms, and an engine whose first hundreds of prompts all fail will not verify later.
MAX_JUDGEMENTS = 256


# With EAGLE, SGLang announces a page with the token after it.
MAX_PAGE_LOOKAHEAD = max(LOOKAHEAD_TOKENS.values())
# How many tokens after their block vLLM's hashes may cover: one with EAGLE or MTP from 0.33 on
# (vllm/config/vllm.py:678), otherwise none. MTP of several modules covers more, which has to be declared.
LOOKAHEADS_TRIED = (0, 1)


class SchemeState(Enum):
    """The degree of certainty about a worker's hash scheme."""

    ASSUMED = "assumed"
    DECLARED = "declared"
    VERIFIED = "verified"
    UNEXPLAINED = "unexplained"


class HashIdentity:
    """The hash scheme of one worker, and how certain it is."""

    def __init__(self, spec: CatalogSpec, candidates: tuple[HashScheme, ...]) -> None:
        """Assume the first candidate.

        Args:
            spec: The stated catalog.
            candidates: The schemes that could explain this worker's hashes, the likeliest first; at least one.
        """
        self._spec = spec
        stated = spec.hash_lookahead_tokens
        self._candidates = _with_lookaheads(candidates, LOOKAHEADS_TRIED if stated is None else (stated,))
        self.scheme = self._candidates[0]
        self.standing = SchemeState.ASSUMED if spec.none_hash is None else SchemeState.DECLARED
        self.hash_block_size: int | None = None
        # Why the worker's extra keys are not understood, or "" if no key of an unknown form came.
        self.keys_problem = ""
        self._judgements = 0

    @property
    def wants_tokens(self) -> bool:
        """Whether the next batches should be decoded with token ids, to verify the scheme."""
        return self.standing is not SchemeState.VERIFIED and self._judgements < MAX_JUDGEMENTS

    @property
    def explained(self) -> bool:
        """Whether some candidate may still explain the worker's hashes."""
        return self.standing is not SchemeState.UNEXPLAINED

    @property
    def label(self) -> str:
        """The scheme and its certainty, for people."""
        if not self.explained and self.keys_problem:
            return f"unknown ({self.keys_problem})"
        if not self.explained:
            return "unknown (explained by none of: " + ", ".join(scheme.label for scheme in self._candidates) + ")"
        return f"{self.scheme.label} ({self.standing.value})"

    def judge(self, event: BlockStored) -> bool:
        """Use a Stored event as evidence if it holds a dense root block, and return whether the standing changed."""
        tokens = event.token_ids
        dense_root = (
            event.medium == GPU
            and event.parent_block_hash is None
            and event.block_size > 0
            and len(event.block_hashes) > 0
            and tokens is not None
            and 0 <= len(tokens) - len(event.block_hashes) * event.block_size <= MAX_PAGE_LOOKAHEAD
        )
        if not dense_root or not self.wants_tokens or tokens is None:
            return False
        keys: object = event.extra_keys[0] if event.extra_keys else None
        self._judgements += 1
        before = self.standing
        verdict = self._verdict(event, tokens, keys, self._spec.hash_block_size)
        if isinstance(verdict, KeysUnknown):
            # Do not count this verdict: it cost no hashing, and a later block may have no keys, or keys of a known form.
            self._judgements -= 1
        elif self._spec.hash_block_size is not None and not isinstance(verdict, SchemeVerified):
            # The stated size may be wrong. Then the scheme is not in doubt, and the catalog's problem names both sizes.
            guessed = self._verdict(event, tokens, keys, None)
            verdict = guessed if isinstance(guessed, SchemeVerified) else verdict
        self._take(verdict)
        return self.standing is not before

    def _verdict(
        self,
        event: BlockStored,
        tokens: NDArray[np.int64],
        keys: object,
        hash_block_size: int | None,
    ) -> Verdict:
        """Return what the first block of a Stored event shows if a hash block has this size; None tries several."""
        return verify_scheme(
            self._candidates,
            block_hash=int(event.block_hashes[0]),
            token_ids=tokens[: event.block_size + max(scheme.lookahead_tokens for scheme in self._candidates)],
            block_size=event.block_size,
            hash_block_size=hash_block_size,
            extra_keys_untagged=keys,
            lora_name=event.lora_name,
            lora_paths=self._spec.lora_paths,
        )

    def prove(self, token_ids: Sequence[int], block_hash: int) -> None:
        """Use an example that the engine computed for this purpose as evidence.

        Args:
            token_ids: A root block of one hash block without extra keys, and the tokens after it that its hash covers.
            block_hash: The engine's hash of that block.
        """
        self._take(
            verify_scheme(
                self._candidates,
                block_hash=block_hash,
                token_ids=token_ids,
                block_size=len(token_ids) - self.scheme.lookahead_tokens,
                hash_block_size=len(token_ids) - self.scheme.lookahead_tokens,
                extra_keys_untagged=None,
                lora_name=None,
                lora_paths={},
            )
        )

    def _take(self, verdict: Verdict) -> None:
        if isinstance(verdict, SchemeVerified):
            self.scheme, self.hash_block_size = verdict.scheme, verdict.hash_block_size
            self.standing, self.keys_problem = SchemeState.VERIFIED, ""
        elif isinstance(verdict, KeysUnknown):
            self.standing, self.keys_problem = SchemeState.UNEXPLAINED, verdict.reason
        elif isinstance(verdict, SchemeUnexplained) and verdict.plain:
            self.standing, self.keys_problem = SchemeState.UNEXPLAINED, ""

    def restore(self, scheme: HashScheme, standing: SchemeState, hash_block_size: int | None) -> None:
        """Take over a scheme that an earlier process of the router verified; ignore any other standing."""
        if standing is SchemeState.VERIFIED and scheme in self._candidates:
            self.scheme, self.standing, self.hash_block_size = scheme, standing, hash_block_size


def _with_lookaheads(schemes: tuple[HashScheme, ...], lookaheads: tuple[int, ...]) -> tuple[HashScheme, ...]:
    """Return vLLM's schemes with each lookahead, ordered by lookahead; SGLang's schemes keep their own lookahead."""
    expanded: dict[HashScheme, None] = {}
    for lookahead in lookaheads:
        for scheme in schemes:
            has_own_lookahead = scheme.algo in LOOKAHEAD_TOKENS
            expanded[scheme if has_own_lookahead else msgspec.structs.replace(scheme, lookahead=lookahead)] = None
    return tuple(expanded)
