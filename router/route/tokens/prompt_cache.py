# SPDX-License-Identifier: Apache-2.0
"""A cache of tokens that engines returned, keyed by everything that decides them.

It keeps whole bodies and no prefixes of conversations: a template may rewrite earlier turns when one is added (many
drop their reasoning), so the tokens of a shorter conversation prove nothing about those of a longer one. Entries are
exact for any template, but only for a while, because a template may write the date.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.route.tokens.prompt_tokens import FoundTokens, Source

# Some 5 M tokens at four bytes, less the overhead of each entry.
MEMORY_BYTES = 32 * 1024**2
OVERHEAD_BYTES = 300
# The lifetime of an entry. After midnight, a prompt with yesterday's date finds less than it could, but not for longer
# than this.
LIFE_S = 300.0

# The model, the key of the request (`TokenRequest.key`), and the space in which it is remembered: the salt that the router
# has made, or "".
Key = tuple[str, bytes, str]


class _Entry(NamedTuple):
    ids: NDArray[np.int32]
    source: Source
    items: Items
    until_s: float


class PromptMemory:
    """The cached tokens, bounded in bytes; the least recently used entry is dropped first."""

    def __init__(self, clock: Callable[[], float], memory_bytes: int = MEMORY_BYTES) -> None:
        # Returns monotonic seconds.
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.held_bytes = 0

    def get(self, key: Key) -> FoundTokens | None:
        """Return the tokens of a request, or None if they are unknown or expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() > entry.until_s:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return FoundTokens(entry.ids.astype(np.int64), entry.source, entry.items)

    def put(self, key: Key, found: FoundTokens) -> None:
        """Keep the tokens of a request."""
        if key in self._entries:
            self._drop(key)
        entry = _Entry(found.ids.astype(np.int32), found.source, found.items, self._clock() + LIFE_S)
        self._entries[key] = entry
        self.held_bytes += _size_bytes(entry)
        while self.held_bytes > self._memory_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, model: str) -> None:
        """Drop the entries of a model whose engines have changed."""
        for key in [key for key in self._entries if key[0] == model]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self.held_bytes -= _size_bytes(self._entries.pop(key))


def _size_bytes(entry: _Entry) -> int:
    return entry.ids.nbytes + OVERHEAD_BYTES + sum(OVERHEAD_BYTES + len(item.identifier) for item in entry.items)
