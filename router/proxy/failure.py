# SPDX-License-Identifier: Apache-2.0
"""How an attempt at a worker can fail, and whether another worker may be asked then. Pure.

Never after the first byte of an answer went to the client, and never for a client's error. A request that an engine may have begun
on is sent once more at most: one that kills engines must not go through the fleet.
"""

from __future__ import annotations

from enum import StrEnum

# The first and two more: with a third of a fleet gone at once, one request in thirty meets three of the gone.
MAX_ATTEMPTS = 3
# Of these, attempts that an engine may have begun on.
MAX_ARRIVALS = 2

# What a gateway in front of an engine answers when the engine is gone, and vLLM itself while it scales.
GONE_STATUSES = frozenset({502, 503, 504})

# To send one of these again changes nothing but who computes it.
REPEATABLE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"})


class Kind(StrEnum):
    """The kinds, as the metrics and the header of a retried answer name them."""

    REFUSED = "refused"  # no connection: nobody listens, no route, no such name, TLS that fails
    CONNECT_TIMEOUT = "connect_timeout"
    STALE = "stale"  # a kept connection was closed under the request
    RESET = "reset"  # the connection ended before the first byte of the answer
    LOST = "lost"  # its health checks stopped being answered while the request waited
    SILENT = "silent"  # not a byte for answer_timeout_s
    MALFORMED = "malformed"  # what came is no HTTP
    GONE = "gone"  # one of GONE_STATUSES
    CUT = "cut"  # the connection ended within the answer


# The request cannot have reached the engine.
_BEFORE_ARRIVAL = frozenset({Kind.REFUSED, Kind.CONNECT_TIMEOUT})
# Whoever waited so long has given up, and the next engine would need as long; what is no HTTP is no engine's; of a cut answer the
# client has a part.
_FINAL = frozenset({Kind.SILENT, Kind.MALFORMED, Kind.CUT})


class Failure(Exception):
    """An attempt failed. The text says what happened, for the client and `/workers`."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class Attempts:
    """The attempts of one request. `trail` names those that failed, as the client is told: `w0 refused, w1 reset`."""

    def __init__(self, path: str, *, pinned: bool) -> None:
        self._repeatable = path in REPEATABLE_PATHS
        self._pinned = pinned
        self._made = 0
        self._arrived = 0
        self._prefills = 0
        self.trail: list[str] = []

    @property
    def reuses_connections(self) -> bool:
        """Whether a kept connection may be used: one that is closed under the request leaves open whether the request arrived."""
        return self._repeatable

    def stale(self, worker: str) -> None:
        """A kept connection was closed under the request: it goes to the same worker over a new one."""
        self.trail.append(f"{worker} {Kind.STALE.value}")

    def prefill_failed(self, worker: str, failure: Failure) -> bool:
        """A prefill worker did not compute the prompt; whether another one may be asked. The decode worker always may be."""
        self.trail.append(f"{worker} {failure.kind.value}")
        self._prefills += 1
        arrived = failure.kind not in _BEFORE_ARRIVAL
        self._arrived += arrived
        return not arrived and self._prefills < MAX_ATTEMPTS

    def failed(self, worker: str, failure: Failure) -> bool:
        """One more failed; whether another worker may be asked."""
        self.trail.append(f"{worker} {failure.kind.value}")
        self._made += 1
        # A gateway's 502 does not say how far the request came; vLLM's own 503 does, but looks the same.
        self._arrived += failure.kind not in _BEFORE_ARRIVAL
        if self._pinned or failure.kind in _FINAL or self._made >= MAX_ATTEMPTS:
            return False
        return not self._arrived or (self._repeatable and self._arrived < MAX_ARRIVALS)
