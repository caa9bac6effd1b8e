# SPDX-License-Identifier: Apache-2.0
"""A bounded table of the owners of responses, which forgets the oldest ones. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvrouter.router.route.owners.response_owner import ResponseOwner


class _Entry(NamedTuple):
    owner: ResponseOwner
    made_here: bool
    until_s: float


class OwnerTable:
    """The owners of responses by id, the oldest first. Invariant: at most `max_count`, none older than `ttl_s`."""

    def __init__(self, clock: Callable[[], float], *, max_count: int, ttl_s: float) -> None:
        """Begin empty. `clock` returns monotonic seconds."""
        self._clock = clock
        self._max_count = max_count
        self._ttl_s = ttl_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, response_id: str) -> ResponseOwner | None:
        """Return the owner of a response, or None if it is not known or was forgotten."""
        self._expire()
        entry = self._entries.get(response_id)
        return None if entry is None else entry.owner

    def put(self, response_id: str, owner: ResponseOwner, *, made_here: bool) -> str | None:
        """Remember an owner as the youngest one.

        Returns:
            The id of a response made here that is forgotten for it, or None if there is none.
        """
        self._expire()
        self._entries[response_id] = _Entry(owner, made_here, self._clock() + self._ttl_s)
        self._entries.move_to_end(response_id)
        if len(self._entries) <= self._max_count:
            return None
        oldest_id, oldest = self._entries.popitem(last=False)
        return oldest_id if oldest.made_here else None

    def drop(self, response_id: str) -> None:
        """Forget a response, if it is known."""
        self._entries.pop(response_id, None)

    def _expire(self) -> None:
        """Forget the responses that are too old; they are the first ones, because all are kept equally long."""
        now_s = self._clock()
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            if entry.until_s > now_s:
                return
            del self._entries[response_id]
