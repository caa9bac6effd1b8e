# SPDX-License-Identifier: Apache-2.0
"""The prompts that this router recently sent to engines without events: an estimate of what they hold, marked as such.

Evictions, groups, tiers and the requests of others are unknown, so entries expire. Pieces of whole blocks of the engine
are named by a hash chained from the prompt's start. Pure: the clock's value is passed in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TypeAlias

import msgspec

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.piece_names import piece_names
from kvrouter.router.index.matching.question import Hit, Question

# The length of a piece: a few blocks of most engines, so that there are fewer pieces to remember; a guess is not worth
# more precision. It also stands for the block of an engine that does not say how large its blocks are.
PIECE_TOKENS = 64
# The bound of remembered pieces, some 150 bytes each.
MAX_PIECES = 500_000

# A worker and the number of its process.
Life: TypeAlias = tuple[WorkerKey, int]


class RoutingHistory:
    """Pieces by the life of a worker (`Follower.life`), the least lately sent first. A piece counts for `ttl_s`."""

    def __init__(self, ttl_s: float, max_pieces: int = MAX_PIECES) -> None:
        self._ttl_s = ttl_s
        self._max_pieces = max_pieces
        self._expiry_s: OrderedDict[tuple[Life, int], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expiry_s)

    def sent(self, life: Life, pieces: list[int], now_s: float) -> None:
        """Record that a prompt was sent to a worker's present process.

        Args:
            life: The worker and the number of its process.
            pieces: The names of the prompt's pieces, from its beginning, as `pieces_of` returns them.
            now_s: The present time.
        """
        # The last piece comes first, because a prompt's end must be dropped before its start if room is lacking.
        for piece in reversed(pieces):
            self._expiry_s[life, piece] = now_s + self._ttl_s
            self._expiry_s.move_to_end((life, piece))
        while len(self._expiry_s) > self._max_pieces:
            self._expiry_s.popitem(last=False)

    def hit_tokens(self, life: Life, pieces: list[int], num_tokens: int, now_s: float, block_size: int | None) -> int:
        """Return the tokens of a prompt that the worker was sent and may still hold, in whole blocks.

        Args:
            life: The worker's present process.
            pieces: The prompt's, by `pieces_of` with the same block_size.
            num_tokens: The prompt's length. At least one token is always computed, so its last block may be too.
            now_s: The present time.
            block_size: Tokens of one block of the engine, None where it does not say.
        """
        count = 0
        for piece in pieces:
            if self._expiry_s.get((life, piece), now_s) <= now_s:
                break
            count += 1
        block = block_size or PIECE_TOKENS
        return max(0, min(count * piece_tokens(block_size), (num_tokens - 1) // block * block))

    def forget(self, worker: WorkerKey) -> None:
        """Drop the pieces of all lives of a worker."""
        for name in [name for name in self._expiry_s if name[0][0] == worker]:
            del self._expiry_s[name]

    def expire(self, now_s: float) -> None:
        """Drop the pieces that have expired."""
        while self._expiry_s:
            name, expiry_s = next(iter(self._expiry_s.items()))
            if expiry_s > now_s:
                return
            del self._expiry_s[name]


def piece_tokens(block_size: int | None) -> int:
    """Return the tokens of one piece: as many whole blocks as PIECE_TOKENS needs, so that no piece ends within one."""
    block = block_size or PIECE_TOKENS
    return block * math.ceil(PIECE_TOKENS / block)


def pieces_of(question: Question, block_size: int | None) -> list[int]:
    """Return the names of a prompt's whole pieces, none if only its hashes are known."""
    return piece_names(question, piece_tokens(block_size))


def approximate_hit(hit: Hit, tokens: int) -> Hit:
    """Return the hit of a worker of which only the prompts sent there are known."""
    reason = f"approximate: from what this router sent there ({hit.reason})" if hit.reason else "approximate"
    return msgspec.structs.replace(hit, by_tier=all_on_gpu(tokens), reason=reason, approximate=True)
