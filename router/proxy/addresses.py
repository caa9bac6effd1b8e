# SPDX-License-Identifier: Apache-2.0
"""Where the registered workers' HTTP is, and which of them share one. Pure; made anew when a registration changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrouter.router.allow_list import AllowList
from kvrouter.router.names import WorkerKey
from kvrouter.router.proxy.target import Target, target_of
from kvrouter.router.registration import Registration


class Addresses:
    """targets: of the workers that may be sent requests. ranks: what an engine has to be told, where several of its ranks are
    registered under one URL; one with a URL of its own has no other rank, and refuses to be asked for one.

    unreachable: ids of the workers that nothing can be sent to: registered without a URL, or at one that is not allowed."""

    def __init__(self, registrations: Sequence[Registration], allowed: AllowList) -> None:
        self.targets: dict[WorkerKey, Target] = {}
        self.ranks: dict[WorkerKey, int] = {}
        self.models: set[str] = set()
        unreachable = set()
        sharing: Counter[tuple[str, str]] = Counter()
        for registration in registrations:
            worker, url = registration.worker, registration.url
            self.models.add(worker.model)
            if url is None or allowed.problem(url) is not None:
                unreachable.add(worker.worker_id)
                continue
            self.targets[worker] = target_of(url)
            sharing[worker.model, url] += 1
        for registration in registrations:
            worker, url = registration.worker, registration.url
            if url is not None and sharing[worker.model, url] > 1:
                self.ranks[worker] = worker.dp_rank
        self.unreachable = frozenset(unreachable)
