# SPDX-License-Identifier: Apache-2.0
"""Whether a request of which an attempt failed may go to another worker. Pure.

Never after the first byte of an answer went to the client, and never for a client's error. A request that an engine may
have started is sent once more at most, whatever the age of the connection: a request that kills engines must not go
through the fleet.
"""

from __future__ import annotations

from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.route.tokens.proxied_paths import REPEATABLE_PATHS

# The first and two more: with a third of a fleet gone at once, one request in thirty meets three of the gone.
MAX_ATTEMPTS = 3
# Failed engines that may have started it, including those that were to find its tokens or compute its prompt.
MAX_ARRIVALS = 2

# What a gateway in front of an engine answers when the engine is gone, and vLLM itself while it scales.
GONE_STATUSES = frozenset({502, 503, 504})

# The request cannot have reached the engine.
_BEFORE_ARRIVAL = frozenset({Kind.REFUSED, Kind.CONNECT_TIMEOUT})
# After such a wait the client has given up, and the next engine would need as long; what is not HTTP does not come from
# an engine; of a cut answer the client has a part.
_FINAL = frozenset({Kind.SILENT, Kind.MALFORMED, Kind.CUT})


class AttemptsSpent(Exception):
    """The request must not be sent again: as many engines as allowed may have started it. failure: the last one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Attempts:
    """The attempts of one request. `trail` names those that failed, as the client sees them: `w0 refused, w1 reset`."""

    def __init__(self, path: str, *, pinned: bool) -> None:
        self._repeatable = path in REPEATABLE_PATHS
        self._pinned = pinned
        self._made = 0
        self._arrived = 0
        # Engines that were to do a part of it.
        self._arrived_before = 0
        self._prefills = 0
        self.trail: list[str] = []

    @property
    def reuses_connections(self) -> bool:
        """Whether a kept connection may be used: the engine may close it in the moment in which the request comes
        there, and that looks as if it had begun on it."""
        return self._repeatable

    @property
    def _spent(self) -> bool:
        return self._arrived + self._arrived_before >= MAX_ARRIVALS

    def tokens_failed(self) -> None:
        """An engine that was to find the prompt's tokens may have started it, and did not answer."""
        self._arrived_before += 1

    def stale(self, worker: str) -> None:
        """A kept connection had been closed: the request goes to the same worker over a new one."""
        self.trail.append(f"{worker} {Kind.STALE.value}")

    def prefill_failed(self, worker: str, failure: Failure) -> bool:
        """A prefill worker did not compute the prompt; whether another one may try. If not, the decode worker may.
        Raises Spent."""
        self.trail.append(f"{worker} {failure.kind.value}")
        self._prefills += 1
        if failure.kind in _BEFORE_ARRIVAL:
            return self._prefills < MAX_ATTEMPTS
        self.prefill_broke(failure)
        return False

    def prefill_broke(self, failure: Failure) -> None:
        """A prefill worker began on the prompt, and failed. Raises Spent."""
        self._arrived_before += 1
        if self._spent:
            raise AttemptsSpent(failure)

    def failed(self, worker: str, failure: Failure) -> bool:
        """One more attempt failed; whether another worker may try."""
        self.trail.append(f"{worker} {failure.kind.value}")
        self._made += 1
        # A gateway's 502 does not say how far the request came; vLLM's own 503 does, but looks the same.
        self._arrived += failure.kind not in _BEFORE_ARRIVAL
        if self._pinned or failure.kind in _FINAL or self._made >= MAX_ATTEMPTS:
            return False
        return not self._arrived or (self._repeatable and not self._spent)
