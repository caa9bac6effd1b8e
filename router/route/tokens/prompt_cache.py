# SPDX-License-Identifier: Apache-2.0
"""A cache of tokens that engines returned, under everything that decides them.

Whole bodies and no prefixes of conversations: a template may rewrite earlier turns when one is added (many drop their
reasoning), so the tokens of a shorter conversation say nothing certain of those of a longer one. Exact for any
template, for a while: a template may write the date.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.route.tokens.prompt_tokens import FoundTokens, Source

# Some 5 M tokens at four bytes, less what each entry costs.
MEMORY_BYTES = 32 * 1024**2
OVERHEAD_BYTES = 300
# After midnight, a prompt with the date of yesterday finds less than it could; not for longer than this.
LIFE_S = 300.0

# The model, and the key of the request.
Key = tuple[str, bytes]


class _Entry(NamedTuple):
    ids: NDArray[np.int32]
    source: Source
    items: Items
    until_s: float


class PromptMemory:
    """Bounded in bytes; what was used longest ago goes first. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], memory_bytes: int = MEMORY_BYTES) -> None:
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.held_bytes = 0

    def get(self, key: Key) -> FoundTokens | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() > entry.until_s:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return FoundTokens(entry.ids.astype(np.int64), entry.source, entry.items)

    def put(self, key: Key, found: FoundTokens) -> None:
        if key in self._entries:
            self._drop(key)
        entry = _Entry(found.ids.astype(np.int32), found.source, found.items, self._clock() + LIFE_S)
        self._entries[key] = entry
        self.held_bytes += _size_bytes(entry)
        while self.held_bytes > self._memory_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, model: str) -> None:
        """What was found out for a model; its engines have changed."""
        for key in [key for key in self._entries if key[0] == model]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self.held_bytes -= _size_bytes(self._entries.pop(key))


def _size_bytes(entry: _Entry) -> int:
    return entry.ids.nbytes + OVERHEAD_BYTES + sum(OVERHEAD_BYTES + len(item.identifier) for item in entry.items)
