# SPDX-License-Identifier: Apache-2.0
"""The text of a request: its tokens as far as they matter to the cache, and the hashes of its blocks.

A text grows by one sampled token at a time and never changes in any other way. `hashes` always holds one hash for every
full block of `hash_block_size` tokens, in prompt order, each chaining over the whole prefix.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrouter.simulator.cache.hashing import extend_hashes
from kvrouter.simulator.cache.tokenizer import FIRST_WORD, VOCABULARY


def next_token(tokens: Sequence[int]) -> int:
    """Return a stand-in for greedy sampling: the same text always continues in the same way, and in whole words."""
    return FIRST_WORD + zlib.crc32(repr((len(tokens), tokens[-8:])).encode()) % (VOCABULARY - FIRST_WORD)


class Text(Protocol):
    """The interface of a text that the scheduler uses."""

    num_tokens: int
    hashes: list[bytes]
    cache_salt: str | None

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the token ids of a range, for events; empty if the text has none."""
        ...

    def grow(self) -> int:
        """Sample and append one token, and return it."""
        ...


class TokenText:
    """A text of token ids, hashed as vLLM does."""

    __slots__ = ("_hash_block_size", "_ids", "_root", "_sample", "cache_salt", "hashes", "num_tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        *,
        hash_block_size: int,
        root: bytes,
        cache_salt: str | None = None,
        sample: Callable[[Sequence[int]], int] = next_token,
    ) -> None:
        self._ids = list(tokens)
        self._hash_block_size = hash_block_size
        self._root = root
        self._sample = sample
        self.cache_salt = cache_salt
        self.num_tokens = len(self._ids)
        self.hashes: list[bytes] = []
        extend_hashes(self.hashes, self._ids, hash_block_size, root, cache_salt)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the token ids of a range."""
        return tuple(self._ids[start:end])

    def grow(self) -> int:
        """Sample and append one token; hash the block that it fills, if it fills one."""
        token = self._sample(self._ids)
        self._ids.append(token)
        self.num_tokens += 1
        if self.num_tokens % self._hash_block_size == 0:
            extend_hashes(self.hashes, self._ids, self._hash_block_size, self._root, self.cache_salt)
        return token


# Odd constants of splitmix64 (Steele, Lea, Flood 2014), a mixer of 64 bits: distinct inputs give distinct outputs.
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


class PieceText:
    """A text of which only the identity of its pieces is known, as in request traces. It has no token ids.

    Equal piece ids mean equal prefixes up to the piece's end (the Mooncake traces' rule). So the hash of a block is
    made of its piece's id and its place in the piece: 8 bytes, without hashing a token. Sampled tokens are shared with
    no other text.
    """

    __slots__ = ("_hash_block_size", "_number", "cache_salt", "hashes", "num_tokens")

    def __init__(
        self,
        piece_ids: Sequence[int] | NDArray[np.uint64],
        num_tokens: int,
        *,
        piece_tokens: int,
        hash_block_size: int,
        number: int,
    ) -> None:
        """Create a text from the ids of its pieces. Raises ValueError if the sizes do not match.

        Args:
            piece_ids: One id for each piece. The last piece of a prompt is usually not full; its id stands for the
                tokens that it has.
            num_tokens: The length of the text.
            piece_tokens: Tokens in a full piece.
            hash_block_size: Tokens in a hashed block; it divides `piece_tokens`.
            number: Distinguishes this text's sampled tokens from those of every other text.
        """
        if piece_tokens % hash_block_size:
            raise ValueError(
                f"pieces of {piece_tokens} tokens cannot be hashed in blocks of {hash_block_size}; "
                "take a block size that divides a piece"
            )
        if len(piece_ids) * piece_tokens < num_tokens:
            raise ValueError(f"{num_tokens} tokens need {-(-num_tokens // piece_tokens)} pieces, not {len(piece_ids)}")
        self._hash_block_size = hash_block_size
        self._number = number
        self.cache_salt: str | None = None
        self.num_tokens = num_tokens
        self.hashes = _as_bytes(self.hash_numbers(piece_ids, num_tokens, piece_tokens, hash_block_size))

    @staticmethod
    def hash_numbers(
        piece_ids: Sequence[int] | NDArray[np.uint64], num_tokens: int, piece_tokens: int, hash_block_size: int
    ) -> NDArray[np.uint64]:
        """Return the hashes of a prompt's full blocks as routers see them: (num_tokens // hash_block_size,) numbers."""
        per_piece = piece_tokens // hash_block_size
        ids = np.asarray(piece_ids, np.uint64)
        positions = np.tile(np.arange(1, per_piece + 1, dtype=np.uint64), len(ids))
        return _mixed((np.repeat(ids, per_piece) * np.uint64(per_piece) + positions)[: num_tokens // hash_block_size])

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return nothing, as a trace does not have the tokens."""
        return ()

    def grow(self) -> int:
        """Append one token and return 0, as its id is not known."""
        self.num_tokens += 1
        if self.num_tokens % self._hash_block_size == 0:
            # The upper half of the numbers, which the ids of no trace reach.
            block_number = (1 << 63) + (self._number << 24) + len(self.hashes)
            self.hashes += _as_bytes(_mixed(np.array([block_number], np.uint64)))
        return 0


def _as_bytes(numbers: NDArray[np.uint64]) -> list[bytes]:
    raw = numbers.astype(">u8").tobytes()
    return [raw[i : i + 8] for i in range(0, len(raw), 8)]
