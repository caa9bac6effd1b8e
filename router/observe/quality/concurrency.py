# SPDX-License-Identifier: Apache-2.0
"""Which requests were alone at their worker until their first token, as far as this process sends them. Pure."""

from __future__ import annotations

from kvrouter.router.base.common.ids import WorkerKey


class Flight:
    """One request on its way to a worker. `ended` once."""

    __slots__ = ("_alone", "_at", "_turn")

    def __init__(self, traffic: _Traffic) -> None:
        self._at = traffic
        self._alone = traffic.under_way == 0
        traffic.under_way += 1
        traffic.turns += 1
        self._turn = traffic.turns

    @property
    def uncontested(self) -> bool:
        """None was there when it came, and none has come since."""
        return self._alone and self._at.turns == self._turn

    def ended(self) -> None:
        self._at.under_way -= 1


class _Traffic:
    """One worker's."""

    __slots__ = ("turns", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self.turns = 0


class Concurrency:
    def __init__(self) -> None:
        self._traffic: dict[WorkerKey, _Traffic] = {}

    def begun(self, worker: WorkerKey) -> Flight:
        traffic = self._traffic.get(worker)
        if traffic is None:
            traffic = self._traffic[worker] = _Traffic()
        return Flight(traffic)

    def forget(self, worker: WorkerKey) -> None:
        """It was dropped; requests in progress there end on their own."""
        self._traffic.pop(worker, None)
