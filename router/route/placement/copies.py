# SPDX-License-Identifier: Apache-2.0
"""The tokens that a copy of a prompt's beginning saves later prompts with the same beginning. Pure.

Compiled, see `setup.py`.
"""

from __future__ import annotations

from itertools import accumulate, repeat


class Copies:
    """The savings of a copy of the first pieces of a prompt, for later prompts with the same beginning."""

    def __init__(self, saved_tokens: list[float] | None = None, piece_tokens: int = 1) -> None:
        # Tokens that a copy of the first 0, 1, 2, ... pieces saves; empty if no other prompt began in this way.
        self.saved_tokens: list[float] = [] if saved_tokens is None else saved_tokens
        # The length of a piece, and of the prompt's beginning that other prompts share, in tokens.
        self.piece_tokens = piece_tokens
        self.depth_tokens = max(0, len(self.saved_tokens) - 1) * piece_tokens

    def of(self, hit_tokens: int) -> float:
        """Return the tokens that a copy of a beginning of this length saves.

        A part of a piece saves the same part of the piece's savings.
        """
        piece, rest = hit_tokens // self.piece_tokens, hit_tokens % self.piece_tokens
        last = len(self.saved_tokens) - 1
        if last < 0:
            return 0.0
        before = self.saved_tokens[min(piece, last)]
        if piece >= last:
            return before
        return before + (self.saved_tokens[piece + 1] - before) * rest / self.piece_tokens


NO_COPIES = Copies()


def copies_of(counts: list[tuple[int, int]], piece_tokens: int, workers: int) -> Copies:
    """Return the savings of copies of a prompt's beginnings.

    A piece that k different prompts began with is wanted by (k - 1) / workers other prompts at each worker. Where x
    other prompts want it, a copy saves 1 - 1 / (1 + x) of it.

    Args:
        counts: How many different prompts shared each part of the prompt's beginning, and how many pieces the part has.
        piece_tokens: The length of a piece.
        workers: The number of workers of the model.
    """
    saved_tokens = [0.0]
    for count, pieces in counts:
        if count < 2:
            break
        wanted = (count - 1) / max(1, workers)
        saved_tokens += accumulate(repeat(piece_tokens * wanted / (1 + wanted), pieces), initial=saved_tokens.pop())
    return Copies(saved_tokens, piece_tokens) if len(saved_tokens) > 1 else NO_COPIES
