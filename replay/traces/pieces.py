# SPDX-License-Identifier: Apache-2.0
"""A prompt as ids of its pieces: each id chains over all pieces before it, so equal ids mean equal prefixes.

Token ids are cut into pieces of `piece_tokens` tokens, which is exact. Text without a tokenizer is cut every
`piece_tokens * bytes_per_token` bytes: shared prefixes are right, and their number of tokens is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# An id is multiplied by the blocks of a piece, at most 512, and the upper half of 64 bits is for sampled tokens
# (simulator/cache/text.py).
ID_BITS = 52
_MASK = (1 << ID_BITS) - 1
_WIDTH = 8


def chain(data: bytes, piece_bytes: int) -> NDArray[np.uint64]:
    """Return the ids of the pieces of `data`; the last piece has the rest."""
    ids = []
    before = b""
    for start in range(0, len(data), piece_bytes):
        before = blake2b(before + data[start : start + piece_bytes], digest_size=_WIDTH).digest()
        ids.append(int.from_bytes(before) & _MASK)
    return np.array(ids, np.uint64)


def session_number(name: str | int) -> int:
    """Return the id below 2**52 for a session's name in a trace; 7 and "7" are one session."""
    return int.from_bytes(blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=_WIDTH).digest()) & _MASK


def pieces_of_tokens(tokens: Sequence[int] | NDArray[np.int64], piece_tokens: int) -> NDArray[np.uint64]:
    """Return an exact id for each piece: prompts with the same id at the same index begin alike up to that piece's end."""
    return chain(np.asarray(tokens, np.int64).tobytes(), piece_tokens * np.int64().itemsize)


def pieces_of_text(text: bytes, piece_tokens: int, bytes_per_token: float) -> tuple[NDArray[np.uint64], int]:
    """Return the ids, and the estimated number of tokens, at least 1."""
    piece_bytes = max(1, round(piece_tokens * bytes_per_token))
    whole, rest = divmod(len(text), piece_bytes)
    tokens = whole * piece_tokens + -(-rest * piece_tokens // piece_bytes)
    return chain(text or b"\0", piece_bytes), max(1, tokens)
