# SPDX-License-Identifier: Apache-2.0
"""The decision whether a request may go to another worker after a failed attempt. Pure.

A request is never repeated after the first byte of an answer went to the client, and never because of a client's error.
If an engine may have started it, it is sent at most once more, whatever the age of the connection: a request that kills
engines must not go through the fleet.
"""

from __future__ import annotations

from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.route.tokens.proxied_paths import REPEATABLE_PATHS

# The first attempt and two more. If a third of a fleet is gone at once, one request in thirty meets three gone workers.
MAX_ATTEMPTS = 3
# The number of failed engines that may have started the request, including engines that were to find its tokens or
# compute its prompt.
MAX_ARRIVALS = 2

# The statuses that a gateway in front of an engine answers when the engine is gone, and vLLM itself while it scales.
GONE_STATUSES = frozenset({502, 503, 504})

# The failures after which the request cannot have reached the engine.
_BEFORE_ARRIVAL = frozenset({Kind.REFUSED, Kind.CONNECT_TIMEOUT})
# The failures that end a request. After a silence the client has given up, and the next engine would need as long; a
# malformed answer does not come from an engine; the client already has a part of a cut answer.
_FINAL = frozenset({Kind.SILENT, Kind.MALFORMED, Kind.CUT})


class AttemptsSpent(Exception):
    """The error that a request must not be sent again, because as many engines as allowed may have started it.

    `failure` is the last failure.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Attempts:
    """The attempts of one request.

    `trail` names those that failed, in the form that the client sees: `w0 refused, w1 reset`.
    """

    def __init__(self, path: str, *, pinned: bool) -> None:
        self._repeatable = path in REPEATABLE_PATHS
        self._pinned = pinned
        # Failed attempts, and those of them that may have reached the engine.
        self._made = 0
        self._arrived = 0
        # Failed engines that were to do a part of the request: to find its tokens or to compute its prompt.
        self._arrived_before = 0
        self._prefills = 0
        self.trail: list[str] = []

    @property
    def reuses_connections(self) -> bool:
        """Whether the request may use a kept connection.

        An engine may close a kept connection just as the request arrives there, which looks as if the engine had
        started it.
        """
        return self._repeatable

    @property
    def _spent(self) -> bool:
        return self._arrived + self._arrived_before >= MAX_ARRIVALS

    def pin(self) -> None:
        """Note that no other worker may try."""
        self._pinned = True

    def tokens_failed(self) -> None:
        """Note that an engine which was to find the prompt's tokens did not answer; it may have started the request."""
        self._arrived_before += 1

    def stale(self, worker: str) -> None:
        """Note that a kept connection was already closed. The request goes to the same worker over a new connection."""
        self.trail.append(f"{worker} {Kind.STALE.value}")

    def prefill_failed(self, worker: str, failure: Failure) -> bool:
        """Note that a prefill worker did not compute the prompt, and return whether another one may try.

        If none may, the decode worker may still compute the prompt itself. Raises AttemptsSpent if the request must not
        be sent again.
        """
        self.trail.append(f"{worker} {failure.kind.value}")
        self._prefills += 1
        if failure.kind in _BEFORE_ARRIVAL:
            return self._prefills < MAX_ATTEMPTS
        self.prefill_broke(failure)
        return False

    def prefill_broke(self, failure: Failure) -> None:
        """Note that a prefill worker started the prompt and failed.

        Raises AttemptsSpent if the request must not be sent again.
        """
        self._arrived_before += 1
        if self._spent:
            raise AttemptsSpent(failure)

    def failed(self, worker: str, failure: Failure) -> bool:
        """Note a failed attempt, and return whether another worker may try."""
        self.trail.append(f"{worker} {failure.kind.value}")
        self._made += 1
        # A gateway's 502 does not say how far the request came; vLLM's own 503 does, but looks the same.
        self._arrived += failure.kind not in _BEFORE_ARRIVAL
        if self._pinned or failure.kind in _FINAL or self._made >= MAX_ATTEMPTS:
            return False
        return not self._arrived or (self._repeatable and not self._spent)
