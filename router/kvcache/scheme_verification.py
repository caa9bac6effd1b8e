# SPDX-License-Identifier: Apache-2.0
"""Which hash scheme a worker uses: assumed at first, verified or refuted by the blocks that it announces.

A wrong assumption finds nothing, so it can only under-credit. Pure; the schemes are in `block_hash.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvrouter.events.vllm.messages import BlockStored
from kvrouter.router.common.ids import GPU
from kvrouter.router.kvcache.block_hash import (
    HashScheme,
    SchemeUnexplained,
    SchemeVerified,
    Verdict,
    known_schemes,
    verify_scheme,
)
from kvrouter.router.workers.registration import CatalogSpec

# Root blocks judged before an unexplained worker is left alone: a judgement costs up to 20 ms, and an engine whose
# first hundreds of prompts all fail will not verify later.
MAX_JUDGEMENTS = 256


class SchemeState(Enum):
    """How well a worker's hash scheme is known."""

    ASSUMED = "assumed"
    DECLARED = "declared"
    VERIFIED = "verified"
    UNEXPLAINED = "unexplained"


def _candidates(spec: CatalogSpec, seed: str | None) -> tuple[HashScheme, ...]:
    """What could explain this worker's hashes: only what was stated, where something was."""
    algo = spec.hash_algo
    if spec.none_hash is not None:
        return (HashScheme.from_bytes(algo or "sha256", bytes.fromhex(spec.none_hash)),)
    stated_seed = spec.none_hash_seed if spec.none_hash_seed is not None else seed
    known = known_schemes(() if stated_seed is None else (stated_seed,))
    if stated_seed is not None:
        # What the user says comes first; an engine with vLLM's default seed is still recognised.
        known = tuple(dict.fromkeys((HashScheme.from_seed(algo or "sha256", stated_seed), *known)))
    return tuple(scheme for scheme in known if algo is None or scheme.algo == algo) or known


class HashIdentity:
    """The hash scheme of one worker and how it is known."""

    def __init__(self, spec: CatalogSpec, seed: str | None) -> None:
        """seed: the engines' PYTHONHASHSEED as configured for the whole router. Raises ValueError on a bad
        none_hash."""
        self._spec = spec
        self._candidates = _candidates(spec, seed)
        self.scheme = self._candidates[0]
        self.standing = SchemeState.ASSUMED if spec.none_hash is None else SchemeState.DECLARED
        self.hash_block_size: int | None = None
        self._judgements = 0

    @property
    def wants_tokens(self) -> bool:
        """Whether the next batches should be decoded with token ids, to verify the scheme."""
        return self.standing is not SchemeState.VERIFIED and self._judgements < MAX_JUDGEMENTS

    @property
    def explained(self) -> bool:
        return self.standing is not SchemeState.UNEXPLAINED

    @property
    def label(self) -> str:
        if not self.explained:
            return "unknown (explained by none of: " + ", ".join(scheme.label for scheme in self._candidates) + ")"
        return f"{self.scheme.label} ({self.standing.value})"

    def judge(self, event: BlockStored) -> bool:
        """Take a Stored event as evidence if it holds a dense root block; True when the standing changed."""
        tokens = event.token_ids
        dense_root = (
            event.medium == GPU
            and event.parent_block_hash is None
            and event.block_size > 0
            and len(event.block_hashes) > 0
            and tokens is not None
            and len(tokens) == len(event.block_hashes) * event.block_size
        )
        if not dense_root or not self.wants_tokens or tokens is None:
            return False
        keys: Sequence[object] | None = event.extra_keys[0] if event.extra_keys else None
        self._judgements += 1
        before = self.standing
        self._take(
            verify_scheme(
                self._candidates,
                block_hash=int(event.block_hashes[0]),
                token_ids=tokens[: event.block_size],
                block_size=event.block_size,
                hash_block_size=self._spec.hash_block_size,
                extra_keys_untagged=keys,
                lora_name=event.lora_name,
                lora_paths=self._spec.lora_paths,
            )
        )
        return self.standing is not before

    def prove(self, token_ids: Sequence[int], block_hash: int) -> None:
        """Take an example that the engine computed for this purpose: a root block of one hash block, without extra
        keys."""
        self._take(
            verify_scheme(
                self._candidates,
                block_hash=block_hash,
                token_ids=token_ids,
                block_size=len(token_ids),
                hash_block_size=len(token_ids),
                extra_keys_untagged=None,
                lora_name=None,
                lora_paths={},
            )
        )

    def _take(self, verdict: Verdict) -> None:
        if isinstance(verdict, SchemeVerified):
            self.scheme, self.hash_block_size = verdict.scheme, verdict.hash_block_size
            self.standing = SchemeState.VERIFIED
        elif isinstance(verdict, SchemeUnexplained) and verdict.plain:
            self.standing = SchemeState.UNEXPLAINED

    def restore(self, scheme: HashScheme, standing: SchemeState, hash_block_size: int | None) -> None:
        """Take over what an earlier process of the router found out."""
        if standing is SchemeState.VERIFIED and scheme in self._candidates:
            self.scheme, self.standing, self.hash_block_size = scheme, standing, hash_block_size
