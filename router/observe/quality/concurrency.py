# SPDX-License-Identifier: Apache-2.0
"""Detection of requests that were alone at their worker until their first token, among those of this process. Pure."""

from __future__ import annotations

from kvrouter.router.base.common.ids import WorkerKey


class Flight:
    """One request on its way to a worker. Call `ended` exactly once."""

    __slots__ = ("_alone", "_at", "_turn")

    def __init__(self, traffic: _Traffic) -> None:
        self._at = traffic
        self._alone = traffic.under_way == 0
        traffic.under_way += 1
        traffic.turns += 1
        self._turn = traffic.turns

    @property
    def was_alone(self) -> bool:
        """Whether no request was there when this one came, and none has come since."""
        return self._alone and self._at.turns == self._turn

    def ended(self) -> None:
        """Record the end of the request."""
        self._at.under_way -= 1


class _Traffic:
    """The requests of this process to one worker."""

    __slots__ = ("turns", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self.turns = 0


class Concurrency:
    """The requests under way at each worker."""

    def __init__(self) -> None:
        self._traffic: dict[WorkerKey, _Traffic] = {}

    def begun(self, worker: WorkerKey) -> Flight:
        """Record a request to the worker, and return its flight."""
        traffic = self._traffic.get(worker)
        if traffic is None:
            traffic = self._traffic[worker] = _Traffic()
        return Flight(traffic)

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that was dropped; requests in progress there end on their own."""
        self._traffic.pop(worker, None)
