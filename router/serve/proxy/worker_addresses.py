# SPDX-License-Identifier: Apache-2.0
"""HTTP addresses of the registered workers, and which workers share one. Pure; rebuilt when a registration changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.upstream.origin import Target, target_of
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay, Role


class Addresses:
    """The HTTP addresses of all registered workers, at one time."""

    def __init__(
        self, registrations: Sequence[Registration], allowed: AllowList, ranks: Mapping[WorkerKey, int] | None = None
    ) -> None:
        # The addresses of the workers that may be sent requests.
        self.targets: dict[WorkerKey, Target] = {}
        # The rank to send with a request, if several ranks are registered under one URL (`request_rank.py`).
        self.ranks = {} if ranks is None else ranks
        # All models, and the models that have prefill workers.
        self.models: set[str] = set()
        self.prefillers: set[str] = set()
        # The names of the engines of each model; None stands for an engine that is not known yet.
        self.engines: dict[str, set[str | None]] = {}
        # The workers behind each URL, and the URL of each worker.
        self._at: dict[str, set[WorkerKey]] = {}
        self._urls: dict[WorkerKey, str] = {}
        unreachable, by_header = set(), set()
        for registration in registrations:
            worker, url = registration.worker, registration.url
            self.models.add(worker.model)
            self.engines.setdefault(worker.model, set()).add(registration.engine)
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
        # Workers registered without a URL, or with one that is not allowed.
        self.unreachable = frozenset(unreachable)
        # Decode workers whose sidecar gets the prefill worker by header.
        self.by_header = frozenset(by_header)

    def sharing(self, worker: WorkerKey) -> set[WorkerKey]:
        """Return the workers behind the same URL, including this one.

        If one process listens for several ranks, its end is the end of all of them.
        """
        url = self._urls.get(worker)
        return {worker} if url is None else self._at[url]
