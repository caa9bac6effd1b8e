# SPDX-License-Identifier: Apache-2.0
"""Prefixes that are being computed at a worker: credit for choices only, until the engine's events arrive. Pure.

A burst of siblings stays together although no event has reported the first one yet. This is never shown as a hit. It
expires soon after the first token (events have arrived by then), else after a short time. A prefix is named by
a hash chained over pieces of PIECE_TOKENS tokens; where only block hashes are known, they are names already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.multimodal import named

# Finer pieces find more of what siblings share, and prompts that are shorter than one share nothing; coarser ones cost
# less to name: 64 names for 8,192 tokens here.
PIECE_TOKENS = 128
# The prefill of a long prompt behind others; without a first token it counts for this time.
PENDING_TTL_S = 10.0
# A selection without reservation: it is unknown whether the request was sent there.
SELECTED_TTL_S = 2.0
# From the first token until the engine's events are in the mirror: some milliseconds, a flush and a busy machine.
SETTLE_S = 0.5
# Some 250 bytes each.
MAX_NAMES = 200_000


def step_of(question: Question, hash_block_size: int) -> int:
    """Return the tokens from one name of a prompt's prefixes to the next."""
    if question.token_ids is not None or question.block_hashes is None:
        return PIECE_TOKENS
    return max(1, PIECE_TOKENS // hash_block_size) * hash_block_size


def names_of(question: Question, hash_block_size: int, seed: int) -> tuple[list[int], int]:
    """Names of the prompt's prefixes, and the tokens from one to the next.

    seed: secret of the process, so that no client can construct two prompts with one name."""
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
    """Names by worker, the first to expire first among those of one kind."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max = max_names
        # By name: when it ends at each worker.
        self._expiry_s: OrderedDict[int, dict[WorkerKey, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expiry_s)

    def sent(self, worker: WorkerKey, names: Sequence[int], ends_s: float) -> None:
        """A prompt with these prefixes went there, and counts until then."""
        # The last first: when room is short, a prompt's end is dropped before its start.
        expiry_s = self._expiry_s
        get, renew = expiry_s.get, expiry_s.move_to_end
        for name in reversed(names):
            known = get(name)
            if known is None:
                expiry_s[name] = {worker: ends_s}
                continue
            if known.get(worker, 0.0) < ends_s:
                known[worker] = ends_s
            renew(name)
        while len(self._expiry_s) > self._max:
            self._expiry_s.popitem(last=False)

    def settle(self, worker: WorkerKey, names: Sequence[int], ends_s: float) -> None:
        """Its first token came: the engine's events take over at `ends_s`."""
        if not self._expiry_s:
            return
        get = self._expiry_s.get
        for name in names:
            known = get(name)
            if known is not None and known.get(worker, ends_s) > ends_s:
                known[worker] = ends_s

    def tokens(self, names: Sequence[int], step_tokens: int, num_tokens: int, now: float) -> dict[WorkerKey, int]:
        """How far the prompt's beginning is on its way into each worker's cache, in tokens; one is always to be
        computed."""
        found: dict[WorkerKey, int] = {}
        reached = []
        get = self._expiry_s.get
        for name in names:
            known = get(name)
            if known is None:
                break
            reached.append(known)
        for steps in range(len(reached), 0, -1):
            known = reached[steps - 1]
            # Who has a prefix has its beginnings too: where no more have it, there is nobody new.
            if len(known) > len(found):
                for worker, expiry_s in known.items():
                    if expiry_s > now and worker not in found:
                        found[worker] = min(steps * step_tokens, num_tokens - 1)
        return found

    def expire(self, now: float) -> None:
        """Drop what has ended. The longest believed in is bounded, so a look at the oldest is enough."""
        while self._expiry_s:
            name, known = next(iter(self._expiry_s.items()))
            live = {worker: ends_s for worker, ends_s in known.items() if ends_s > now}
            if live:
                self._expiry_s[name] = live
                return
            del self._expiry_s[name]
