# SPDX-License-Identifier: Apache-2.0
"""A text's token ids, with a cache for the pieces between special tokens.

A conversation that continues repeats its earlier text, and the text that a template makes of it has special tokens at
every message. A tokenizer first cuts a text at those and treats each piece alone, so a piece has the same ids wherever
it stands and whatever produced it. This is a property of the tokenizer and not of the template (which may rewrite
earlier turns at will). Texts are cut only at tokens for which it must hold; if a trial contradicts it when the
tokenizer is loaded, or if there is no such token, every text is encoded whole.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# The size of the cache, with eight bytes an id and the text itself: some thousand long messages.
MEMORY_BYTES = 64 * 1024**2
# The largest text that is encoded directly. Longer texts go to the library's own threads, which work without Python's
# lock but take some 100 us to start.
ALONE_CHARS = 2_048
# The overhead of a piece besides its text and ids.
OVERHEAD_BYTES = 200

# Pieces whose ids would change if a tokenizer looked beyond the special tokens between them.
_TRIAL = (" a b", "b a ", "\n\nGröße", "x", "  ", "日本 go", "1.5")


class PieceCache:
    """A tokenizer with a cache of pieces. Several threads may use it."""

    def __init__(self, tokenizer: Tokenizer, templates: str, memory_bytes: int = MEMORY_BYTES) -> None:
        """Find the special tokens at which texts can be cut.

        Args:
            tokenizer: The tokenizer.
            templates: The texts of the chat templates; only special tokens that they write are worth cutting at.
            memory_bytes: The limit on the cache's size.
        """
        self._tokenizer = tokenizer
        self._memory: OrderedDict[str, NDArray[np.int64]] = OrderedDict()
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0
        # The ids of the special tokens at which texts are cut, and the pattern that finds these tokens.
        self._cuts: dict[str, int] = {}
        self._at = re.compile(r"(?!)")
        cuts = _cuts(tokenizer, templates)
        if cuts:
            self._cuts = cuts
            self._at = re.compile("(" + "|".join(map(re.escape, cuts)) + ")")
            if not self._holds():
                self._cuts = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int64]:
        """Return the ids of a text (int64)."""
        if add_special_tokens or not self._cuts:
            return self._whole(text, add_special_tokens=add_special_tokens)
        # The parts at odd places are special tokens.
        parts = self._at.split(text)
        pieces: list[NDArray[np.int64] | None] = [None] * len(parts)
        missing: list[int] = []
        with self._lock:
            for index, part in enumerate(parts):
                if index % 2:
                    pieces[index] = np.array([self._cuts[part]], np.int64)
                elif not part:
                    pieces[index] = np.empty(0, np.int64)
                elif (cached := self._memory.get(part)) is not None:
                    self._memory.move_to_end(part)
                    pieces[index] = cached
                else:
                    missing.append(index)
        if missing:
            encoded = self._encoded([parts[index] for index in missing], add_special_tokens=False)
            for index, ids in zip(missing, encoded, strict=True):
                pieces[index] = ids
                self._keep(parts[index], ids)
        return np.concatenate([ids for ids in pieces if ids is not None])

    def _whole(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int64]:
        """Encode a text without cutting it."""
        return self._encoded([text], add_special_tokens=add_special_tokens)[0]

    def _encoded(self, texts: list[str], *, add_special_tokens: bool) -> list[NDArray[np.int64]]:
        """Encode each text, in the library's threads if there is much to do."""
        if sum(map(len, texts)) <= ALONE_CHARS:
            encoded = [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        else:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, np.int64) for encoding in encoded]

    def _keep(self, piece: str, ids: NDArray[np.int64]) -> None:
        """Add a piece to the cache, unless it would take a quarter of it."""
        size = _size_bytes(piece, ids)
        if size > self._memory_bytes // 4:
            return
        ids.setflags(write=False)
        with self._lock:
            if piece in self._memory:
                return
            self._memory[piece] = ids
            self.held_bytes += size
            while self.held_bytes > self._memory_bytes:
                oldest, oldest_ids = self._memory.popitem(last=False)
                self.held_bytes -= _size_bytes(oldest, oldest_ids)

    def _holds(self) -> bool:
        """Return whether a text that is cut has the same ids as when it is encoded whole, for each cut."""
        for cut in self._cuts:
            text = cut.join(_TRIAL)
            if not np.array_equal(
                self.encode(text, add_special_tokens=False), self._whole(text, add_special_tokens=False)
            ):
                return False
        return True


def _size_bytes(piece: str, ids: NDArray[np.int64]) -> int:
    """Return the size of a piece in the cache."""
    # A character takes at most four bytes.
    return 4 * len(piece) + ids.nbytes + OVERHEAD_BYTES


def _cuts(tokenizer: Tokenizer, templates: str) -> dict[str, int]:
    """Return the tokens at which this tokenizer cuts any text first, whatever is beside them, with their ids."""
    added = list(tokenizer.get_added_tokens_decoder().items())
    # A token that must be a separate word depends on its neighbours. In addition, some pre-tokenizers treat the first
    # piece of a text differently.
    if any(token.single_word for _, token in added):
        return {}
    if _names_first(json.loads(tokenizer.to_str()).get("pre_tokenizer")):
        return {}
    # Normalized tokens are searched after the text was normalized, that is, within a piece.
    contents = [str(token.content) for _, token in added if not token.normalized]
    ends = {text[at:] for text in contents for at in range(1, len(text))}
    return {
        token.content: number
        for number, token in added
        # Tokens that strip take spaces from their neighbours.
        if not (token.normalized or token.lstrip or token.rstrip)
        and token.content in templates
        and not _overlapped(token.content, contents, ends)
    }


def _overlapped(cut: str, contents: list[str], ends: set[str]) -> bool:
    """Return whether another token may be found in place of this one.

    That is the case if another token contains it, or ends with its beginning.
    """
    within = any(cut in text for text in contents if text != cut)
    return within or any(cut[:length] in ends for length in range(1, len(cut)))


def _names_first(part: Any) -> bool:
    """Return whether any part of a pre-tokenizer prepends something to the first piece alone."""
    if isinstance(part, dict):
        return part.get("prepend_scheme") == "first" or any(map(_names_first, part.values()))
    return isinstance(part, list) and any(map(_names_first, part))
