# SPDX-License-Identifier: Apache-2.0
"""The process's only judgement of whether Redis is heard.

Redis is heard if it answers the looks at the routers' heartbeats, and if the log of each worker that others follow can
be read. In a cluster, some logs may be readable while others are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError, refusal_text
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.membership import HEARD_S

log = logging.getLogger("kvrouter.fleet")


class StoreContact:
    """The contact with Redis. `judge` logs each change of it once."""

    def __init__(self, *, metrics: FleetMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._answered_s = clock()
        # For each worker whose log cannot be followed, the reason.
        self._unread: dict[WorkerKey, str] = {}
        # Since when some log cannot be followed.
        self._unread_since_s = 0.0
        self._is_lost = False
        # The error with which the server refused the last look, or "" if it answered or was silent.
        self._refusal = ""

    def answered(self) -> None:
        """Note that a look was answered."""
        self._answered_s, self._refusal = self._clock(), ""

    def failed(self, error: StoreError) -> None:
        """Note that a look was not answered, or was refused."""
        self._refusal = refusal_text(error) if isinstance(error, ReplyError) else ""

    def lose_logs(self, workers: Iterable[WorkerKey], reason: str) -> None:
        """Note that the logs of these workers cannot be followed."""
        if not self._unread:
            self._unread_since_s = self._clock()
        self._unread |= dict.fromkeys(workers, reason)

    def regain_logs(self, workers: Iterable[WorkerKey]) -> None:
        """Note that the logs of these workers can be followed, or need not be."""
        for worker in workers:
            self._unread.pop(worker, None)

    @property
    def _silent_s(self) -> float:
        """For how many seconds no look was answered, 0 up to HEARD_S."""
        silent_s = self._clock() - self._answered_s
        return silent_s if silent_s > HEARD_S else 0.0

    @property
    def lost_s(self) -> float:
        """The age in seconds of the last knowledge from other routers, 0 while Redis is heard."""
        return max(self._silent_s, self._clock() - self._unread_since_s if self._unread else 0.0)

    @property
    def silence(self) -> str | None:
        """A sentence which says that Redis does not answer, or refuses the heartbeats; None while it answers."""
        if not (silent_s := self._silent_s):
            return None
        if self._refusal:
            return f"Redis has refused for {silent_s:.0f} s what routers write ({self._refusal})"
        return f"Redis has not answered for {silent_s:.0f} s"

    @property
    def unread_problem(self) -> str | None:
        """Why the log of some worker cannot be followed, None if all can be."""
        if not self._unread:
            return None
        reason = next(iter(self._unread.values()))
        return f"Redis does not answer ({reason}): what other routers learn is not known here"

    @property
    def problem(self) -> str | None:
        """Why the knowledge of other routers does not reach this process, None if it does."""
        if self._unread or (silence := self.silence) is None:
            return self.unread_problem
        return f"{silence}: what other routers learn is not known here, and the other way round"

    def judge(self, *, is_refused: bool = False) -> None:
        """Log and count a change of the contact. Call this periodically, because silence raises no event.

        Args:
            is_refused: Whether the store refuses this process's commits.
        """
        problem = self.problem
        self._metrics.store_up.set(problem is None and not is_refused)
        if (problem is not None) is not self._is_lost:
            self._is_lost = problem is not None
            if self._is_lost:
                log.warning("store lost", extra={"reason": problem})
            else:
                log.info("store back")
