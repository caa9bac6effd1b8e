# SPDX-License-Identifier: Apache-2.0
"""Names of a prompt's pieces, each chained over all pieces before it, so equal names mean equal beginnings. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.multimodal import named


def piece_names(question: Question, piece_tokens: int, *, with_rest: bool = False) -> list[int]:
    """Return the names of a prompt's whole pieces; none if only the prompt's hashes are known.

    Args:
        question: The question about the prompt.
        piece_tokens: Tokens of one piece.
        with_rest: Whether the tokens left at the end have a name too.
    """
    if question.token_ids is None:
        return []
    tokens: NDArray[np.int64] = np.ascontiguousarray(question.token_ids)
    name = xxh3_64_intdigest(f"{question.lora_name or ''}\0{question.cache_salt or ''}".encode())
    names = []
    for start in range(0, len(tokens) if with_rest else len(tokens) - piece_tokens + 1, piece_tokens):
        name = named(name, question.items, start, start + piece_tokens)
        name = xxh3_64_intdigest(tokens[start : start + piece_tokens].tobytes(), seed=name)
        names.append(name)
    return names
