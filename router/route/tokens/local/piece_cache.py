# SPDX-License-Identifier: Apache-2.0
"""Text to token ids, with a memory for the pieces between special tokens.

A conversation that goes on repeats what was said, and what a template makes of it is cut by special tokens at every
message. A tokenizer cuts text at those first and treats each piece alone, so a piece has the same ids wherever it
stands and however it came there. That is a fact of the tokenizer and not of the template (which may rewrite earlier
turns at will), and is checked when it is loaded: a token for which it does not hold is no cut, and without any cut
every text is encoded whole.
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

# Eight bytes an id and the text itself; some thousand long messages.
MEMORY_BYTES = 64 * 1024**2
# Up to this a text is encoded at once; more goes to the library's own threads, without Python's lock, for some 100 us.
ALONE_CHARS = 2_048
# What a piece costs beside its text and ids.
OVERHEAD_BYTES = 200

# Between them, pieces that would differ if a tokenizer looked beyond a special token.
_TRIAL = (" a b", "b a ", "\n\nGröße", "x", "  ", "日本 go", "1.5")


class PieceCache:
    """May be used by several threads. templates: where texts come from; only tokens that they write are worth cutting
    at."""

    def __init__(self, tokenizer: Tokenizer, templates: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self._tokenizer = tokenizer
        self._memory: OrderedDict[str, NDArray[np.int64]] = OrderedDict()
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0
        self._cuts: dict[str, int] = {}
        self._at = re.compile(r"(?!)")
        cuts = _cuts(tokenizer, templates)
        if cuts:
            self._cuts = cuts
            self._at = re.compile("(" + "|".join(map(re.escape, cuts)) + ")")
            if not self._holds():
                self._cuts = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int64]:
        if add_special_tokens or not self._cuts:
            return self._whole(text, add_special_tokens=add_special_tokens)
        # Every second one is a special token.
        parts = self._at.split(text)
        found: list[NDArray[np.int64] | None] = [None] * len(parts)
        missing: list[int] = []
        with self._lock:
            for index, part in enumerate(parts):
                if index % 2:
                    found[index] = np.array([self._cuts[part]], np.int64)
                elif not part:
                    found[index] = np.empty(0, np.int64)
                elif (known := self._memory.get(part)) is not None:
                    self._memory.move_to_end(part)
                    found[index] = known
                else:
                    missing.append(index)
        if missing:
            new = self._encoded([parts[index] for index in missing], add_special_tokens=False)
            for index, ids in zip(missing, new, strict=True):
                found[index] = ids
                self._keep(parts[index], ids)
        return np.concatenate([ids for ids in found if ids is not None])

    def _whole(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int64]:
        return self._encoded([text], add_special_tokens=add_special_tokens)[0]

    def _encoded(self, texts: list[str], *, add_special_tokens: bool) -> list[NDArray[np.int64]]:
        if sum(map(len, texts)) <= ALONE_CHARS:
            encoded = [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        else:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, np.int64) for encoding in encoded]

    def _keep(self, piece: str, ids: NDArray[np.int64]) -> None:
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
                old, gone = self._memory.popitem(last=False)
                self.held_bytes -= _size_bytes(old, gone)

    def _holds(self) -> bool:
        """Whether a text that is cut here has the ids that it has when it is encoded whole."""
        for cut in self._cuts:
            text = cut.join(_TRIAL)
            if not np.array_equal(
                self.encode(text, add_special_tokens=False), self._whole(text, add_special_tokens=False)
            ):
                return False
        return True


def _size_bytes(piece: str, ids: NDArray[np.int64]) -> int:
    # Four bytes a character at most.
    return 4 * len(piece) + ids.nbytes + OVERHEAD_BYTES


def _cuts(tokenizer: Tokenizer, templates: str) -> dict[str, int]:
    """Tokens at which this tokenizer cuts a text before all else and whatever is beside them, with their ids."""
    added = list(tokenizer.get_added_tokens_decoder().items())
    # One that must be a word of its own looks at its neighbours. And some pre-tokenizers treat a text's first piece
    # otherwise.
    if any(token.single_word for _, token in added):
        return {}
    if _names_first(json.loads(tokenizer.to_str()).get("pre_tokenizer")):
        return {}
    # The others are looked for after a text was normalized, that is within a piece.
    contents = [str(token.content) for _, token in added if not token.normalized]
    ends = {text[at:] for text in contents for at in range(1, len(text))}
    return {
        token.content: number
        for number, token in added
        # Those that strip take spaces of their neighbours.
        if not (token.normalized or token.lstrip or token.rstrip)
        and token.content in templates
        and not _overlapped(token.content, contents, ends)
    }


def _overlapped(cut: str, contents: list[str], ends: set[str]) -> bool:
    """Whether another token may be found in place of this one: one that has it within, or that ends with its
    beginning."""
    within = any(cut in text for text in contents if text != cut)
    return within or any(cut[:length] in ends for length in range(1, len(cut)))


def _names_first(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("prepend_scheme") == "first" or any(map(_names_first, part.values()))
    return isinstance(part, list) and any(map(_names_first, part))
