# SPDX-License-Identifier: Apache-2.0
"""Prefixes that workers are computing; they count for choices only, until the engines' events arrive. Pure.

They keep a burst of similar prompts together before any event reports the first one. A pending prefix is never shown as
a hit. It expires soon after the first token, when its events have arrived, or else after a short time. A prefix is
named by a hash chained over pieces of PIECE_TOKENS tokens; where only block hashes are known, they serve as names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.multimodal import named

# Smaller pieces find more of the beginnings that similar prompts share; prompts shorter than one piece share nothing.
# Larger pieces cost less to name: 8,192 tokens have 64 names here.
PIECE_TOKENS = 128
# How long a prompt without a first token counts: long enough for the prefill of a long prompt behind others.
PENDING_TTL_S = 10.0
# How long a selection without a reservation counts: it is unknown whether the request was sent to its worker.
SELECTED_TTL_S = 2.0
# From the first token until the engine's events are in the mirror: some milliseconds, a flush and a busy machine.
SETTLE_S = 0.5
# Some 250 bytes each.
MAX_NAMES = 200_000


def step_of(question: Question, hash_block_size: int) -> int:
    """Return the number of tokens between consecutive names of a prompt's prefixes."""
    if question.token_ids is not None or question.block_hashes is None:
        return PIECE_TOKENS
    return max(1, PIECE_TOKENS // hash_block_size) * hash_block_size


def names_of(question: Question, hash_block_size: int, seed: int) -> tuple[list[int], int]:
    """Return the names of a prompt's prefixes, and the number of tokens between consecutive names.

    Args:
        question: The prompt. Without token ids and block hashes it has no names.
        hash_block_size: Tokens of a block, for prompts of which only block hashes are known.
        seed: A secret of the process, so that no client can construct two prompts with the same name.
    """
    if question.token_ids is not None:
        space = f"{question.model}\0{question.lora_name or ''}\0{question.cache_salt or ''}"
        name = xxh3_64_intdigest(space.encode("utf-8", "surrogatepass"), seed)
        tokens = np.ascontiguousarray(question.token_ids).view(np.uint8).data
        size_bytes = PIECE_TOKENS * question.token_ids.itemsize
        names = []
        for start in range(0, len(tokens) - size_bytes + 1, size_bytes):
            if question.items:
                first = start // question.token_ids.itemsize
                name = named(name, question.items, first, first + PIECE_TOKENS)
            name = xxh3_64_intdigest(tokens[start : start + size_bytes], name)
            names.append(name)
        return names, PIECE_TOKENS
    if question.block_hashes is None:
        return [], PIECE_TOKENS
    step_tokens = step_of(question, hash_block_size)
    step = step_tokens // hash_block_size
    return question.block_hashes[step - 1 :: step].tolist(), step_tokens


class PendingPrefixes:
    """The names of pending prefixes, and when they expire at each worker.

    Names are in the order in which they were last sent, so among names with the same lifetime the first to expire comes
    first.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max = max_names
        # For the name of each prefix, the time at which it expires at each worker.
        self._expiry_s: OrderedDict[int, dict[WorkerKey, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expiry_s)

    def sent(self, worker: WorkerKey, names: Sequence[int], ends_s: float) -> None:
        """Count a prompt with these prefixes, which was sent to a worker, until `ends_s`."""
        # Start with the longest prefix, so that the end of a prompt is dropped before its start when memory is short.
        expiry_s = self._expiry_s
        get, renew = expiry_s.get, expiry_s.move_to_end
        for name in reversed(names):
            expiries = get(name)
            if expiries is None:
                expiry_s[name] = {worker: ends_s}
                continue
            if expiries.get(worker, 0.0) < ends_s:
                expiries[worker] = ends_s
            renew(name)
        while len(self._expiry_s) > self._max:
            self._expiry_s.popitem(last=False)

    def settle(self, worker: WorkerKey, names: Sequence[int], ends_s: float) -> None:
        """Expire a prompt's prefixes at `ends_s`, after its first token: from then on the engine's events count."""
        if not self._expiry_s:
            return
        get = self._expiry_s.get
        for name in names:
            expiries = get(name)
            if expiries is not None and expiries.get(worker, ends_s) > ends_s:
                expiries[worker] = ends_s

    def tokens(self, names: Sequence[int], step_tokens: int, num_tokens: int, now: float) -> dict[WorkerKey, int]:
        """Return how many tokens of the prompt's beginning each worker is computing; absent workers compute none.

        It is at most the prompt's length less one, because the last token is always computed.
        """
        tokens: dict[WorkerKey, int] = {}
        reached = []
        get = self._expiry_s.get
        for name in names:
            expiries = get(name)
            if expiries is None:
                break
            reached.append(expiries)
        for steps in range(len(reached), 0, -1):
            expiries = reached[steps - 1]
            # A worker with a prefix also has its shorter prefixes, so a shorter one can add workers only if more have
            # it.
            if len(expiries) > len(tokens):
                for worker, expiry_s in expiries.items():
                    if expiry_s > now and worker not in tokens:
                        tokens[worker] = min(steps * step_tokens, num_tokens - 1)
        return tokens

    def expire(self, now: float) -> None:
        """Drop the names of prompts' pieces that have expired, oldest first.

        It stops at the first name that has not expired: lifetimes are bounded, so the names behind that one end soon,
        too.
        """
        while self._expiry_s:
            name, expiries = next(iter(self._expiry_s.items()))
            live = {worker: ends_s for worker, ends_s in expiries.items() if ends_s > now}
            if live:
                self._expiry_s[name] = live
                return
            del self._expiry_s[name]
