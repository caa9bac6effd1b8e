# SPDX-License-Identifier: Apache-2.0
"""Where the registered workers' HTTP is, and which of them share one. Pure; made anew when a registration changed."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.proxy.upstream.origin import Target, target_of
from kvrouter.router.workers.allow_list import AllowList
from kvrouter.router.workers.registration import Registration
from kvrouter.router.workers.role import HandoverWay, Role


class Addresses:
    """targets: of the workers that may be sent requests. ranks: what an engine has to be told, where several of its
    ranks are registered under one URL; one with a URL of its own has no other rank, and refuses to be asked for one.

    unreachable: workers that nothing can be sent to: registered without a URL, or at one that is not allowed.
    by_header: decode workers whose sidecar is told by a header where a prompt is to be computed. prefillers: models
    that have prefill workers."""

    def __init__(self, registrations: Sequence[Registration], allowed: AllowList) -> None:
        self.targets: dict[WorkerKey, Target] = {}
        self.ranks: dict[WorkerKey, int] = {}
        self.models: set[str] = set()
        self.prefillers: set[str] = set()
        self._at: dict[str, set[WorkerKey]] = {}
        self._urls: dict[WorkerKey, str] = {}
        unreachable, by_header = set(), set()
        for registration in registrations:
            worker, url = registration.worker, registration.url
            self.models.add(worker.model)
            if registration.role is Role.PREFILL:
                self.prefillers.add(worker.model)
            if registration.handover is HandoverWay.HEADER:
                by_header.add(worker)
            if url is None or allowed.problem(url) is not None:
                unreachable.add(worker)
                continue
            self.targets[worker] = target_of(url)
            self._at.setdefault(url, set()).add(worker)
            self._urls[worker] = url
        for worker, url in self._urls.items():
            if sum(other.model == worker.model for other in self._at[url]) > 1:
                self.ranks[worker] = worker.dp_rank
        self.unreachable = frozenset(unreachable)
        self.by_header = frozenset(by_header)

    def sharing(self, worker: WorkerKey) -> set[WorkerKey]:
        """The workers behind the same URL, itself included: where one process listens for several ranks, it is gone for
        all."""
        url = self._urls.get(worker)
        return {worker} if url is None else self._at[url]
