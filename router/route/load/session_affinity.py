# SPDX-License-Identifier: Apache-2.0
"""Where each session was last, and how long its prompt was. Pure; the clock's value is passed in."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvrouter.router.base.common.ids import WorkerKey

# A user who reads an answer and writes the next question takes seconds to minutes; caches turn over in some minutes.
SESSION_TTL_S = 900.0
# Some 300 bytes each with a name of usual length.
MAX_SESSIONS = 50_000
# Longer names are not remembered.
MAX_SESSION_ID_CHARS = 256


class SessionPlace(NamedTuple):
    worker: WorkerKey
    tokens: int
    expiry_s: float


class SessionMemory:
    """Sessions, the least lately seen first."""

    def __init__(self, ttl_s: float = SESSION_TTL_S, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._places: OrderedDict[tuple[str, str], SessionPlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, model: str, session_id: str, now: float) -> SessionPlace | None:
        place = self._places.get((model, session_id))
        return place if place is not None and place.expiry_s > now else None

    def record_choice(self, session_id: str, worker: WorkerKey, tokens: int, now: float) -> None:
        """The session's prompt, with this number of tokens, went there."""
        if len(session_id) > MAX_SESSION_ID_CHARS:
            return
        name = (worker.model, session_id)
        self._places[name] = SessionPlace(worker, tokens, now + self._ttl_s)
        self._places.move_to_end(name)
        while len(self._places) > self._max:
            self._places.popitem(last=False)

    def expire(self, now: float) -> None:
        while self._places:
            name, place = next(iter(self._places.items()))
            if place.expiry_s > now:
                return
            del self._places[name]
