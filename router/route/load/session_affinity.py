# SPDX-License-Identifier: Apache-2.0
"""The worker that each session used last, and the length of its prompt. Pure; the current time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvrouter.router.base.common.ids import WorkerKey

# How long a session is remembered. A user who reads an answer and writes the next question takes seconds to minutes;
# caches turn over in some minutes.
SESSION_TTL_S = 900.0
# Some 300 bytes each, with a session id of usual length.
MAX_SESSIONS = 50_000
# Sessions with longer ids are not remembered.
MAX_SESSION_ID_CHARS = 256


class SessionPlace(NamedTuple):
    """The worker and the prompt length, in tokens, of a session's last request."""

    worker: WorkerKey
    tokens: int
    expiry_s: float


class SessionMemory:
    """The places of sessions, the least recently used first."""

    def __init__(self, ttl_s: float = SESSION_TTL_S, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._places: OrderedDict[tuple[str, str], SessionPlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, model: str, session_id: str, now: float) -> SessionPlace | None:
        """Return a session's place, or None if it is unknown or expired."""
        place = self._places.get((model, session_id))
        return place if place is not None and place.expiry_s > now else None

    def record_choice(self, session_id: str, worker: WorkerKey, tokens: int, now: float) -> None:
        """Remember that a session's prompt of this many tokens went to a worker."""
        if len(session_id) > MAX_SESSION_ID_CHARS:
            return
        name = (worker.model, session_id)
        self._places[name] = SessionPlace(worker, tokens, now + self._ttl_s)
        self._places.move_to_end(name)
        while len(self._places) > self._max:
            self._places.popitem(last=False)

    def expire(self, now: float) -> None:
        """Drop expired sessions."""
        while self._places:
            name, place = next(iter(self._places.items()))
            if place.expiry_s > now:
                return
            del self._places[name]
