# SPDX-License-Identifier: Apache-2.0
"""Text to token ids, with a memory for the pieces between special tokens.

A conversation that goes on repeats what was said, and what a template makes of it is cut by special tokens at every message. A
tokenizer cuts text at those first and treats each piece alone, so a piece has the same ids wherever it stands and however it came
there. That is a fact of the tokenizer and not of the template (which may rewrite earlier turns at will), and is checked when it is
loaded: where it does not hold, nothing is remembered and every text is encoded whole.
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
# A shorter piece is encoded faster than it is kept in order.
MIN_PIECE_CHARS = 32
# What a piece costs beside its text and ids.
OVERHEAD_BYTES = 200

# Between them, pieces that would differ if a tokenizer looked beyond a special token.
_TRIAL = (" a b", "b a ", "\n\nGröße", "x", "  ", "日本 go", "1.5")


class Pieces:
    """May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, memory_bytes: int = MEMORY_BYTES) -> None:
        self._tokenizer = tokenizer
        self._memory: OrderedDict[str, NDArray[np.int64]] = OrderedDict()
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self.held_bytes = 0
        self._cuts: dict[str, int] = {}
        self._at = re.compile(r"(?!)")
        cuts = _cuts(tokenizer)
        if cuts:
            self._cuts = cuts
            # The longest first: of two that begin alike, the tokenizer takes the longer.
            self._at = re.compile("(" + "|".join(map(re.escape, sorted(cuts, key=len, reverse=True))) + ")")
            if not self._holds():
                self._cuts = {}

    @property
    def remembers(self) -> bool:
        return bool(self._cuts)

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
            # One call, which lets other threads run meanwhile.
            encoded = self._tokenizer.encode_batch_fast([parts[index] for index in missing], add_special_tokens=False)
            for index, encoding in zip(missing, encoded, strict=True):
                ids = np.array(encoding.ids, np.int64)
                found[index] = ids
                self._keep(parts[index], ids)
        return np.concatenate([ids for ids in found if ids is not None])

    def _whole(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int64]:
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoded[0].ids, np.int64)

    def _keep(self, piece: str, ids: NDArray[np.int64]) -> None:
        size = _size_bytes(piece, ids)
        if len(piece) < MIN_PIECE_CHARS or size > self._memory_bytes // 4:
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


def _cuts(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens at which this tokenizer cuts a text before all else, with their ids; none where a piece's ids could depend on
    what is beside it."""
    added = tokenizer.get_added_tokens_decoder()
    # Those that are found in the normalized text are found within a piece, as ever.
    cuts = {str(token.content): number for number, token in added.items() if not token.normalized}
    for token in added.values():
        # These take spaces of their neighbours, or look at them.
        if token.lstrip or token.rstrip or token.single_word:
            return {}
    # A pre-tokenizer that treats the first piece of a text otherwise than all others.
    return {} if _names_first(json.loads(tokenizer.to_str()).get("pre_tokenizer")) else cuts


def _names_first(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("prepend_scheme") == "first" or any(map(_names_first, part.values()))
    return isinstance(part, list) and any(map(_names_first, part))
