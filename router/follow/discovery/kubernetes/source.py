# SPDX-License-Identifier: Apache-2.0
"""Workers from Kubernetes' pods, which are listed once and then watched: the async shell around `pods.py` and `api.py`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.follow.discovery.kubernetes.api import ClusterApi, ClusterError, WatchExpired
from kvrouter.router.follow.discovery.kubernetes.pods import Pod, candidates_of
from kvrouter.router.model.workers.source_precedence import KUBERNETES

# The pause before a retry, doubled from the first to the last. Each is varied at random between half of it and all of
# it, because all routers of a fleet lose an API server at once and must not return at once.
RETRY_FIRST_S = 0.5
RETRY_LAST_S = 30.0


class KubernetesSource:
    """The workers in the pods that a label selector selects."""

    name = KUBERNETES

    def __init__(self, api: ClusterApi, *, rng: random.Random, retry_s: float = RETRY_FIRST_S) -> None:
        self.shown: Sequence[Candidate] | None = None
        self.problem = "its pods are not listed yet"
        self._api = api
        self._rng = rng
        self._first_s = retry_s
        self._pods: dict[str, Pod] = {}

    async def run(self, changed: Callable[[], None]) -> None:
        """List the pods, then watch them, until cancelled; call `changed` when the workers or the problem changed."""
        pause_s = self._first_s
        failures = 0
        version: str | None = None
        while True:
            try:
                if version is None:
                    pods, version = await self._api.pods()
                    self._pods = {pod.metadata.name: pod for pod in pods}
                    self._show(changed)
                async for event in self._api.watch(version):
                    version = event.pod.metadata.resource_version or version
                    pause_s, failures = self._first_s, 0
                    if event.type in ("ADDED", "MODIFIED"):
                        self._pods[event.pod.metadata.name] = event.pod
                    elif event.type == "DELETED":
                        self._pods.pop(event.pod.metadata.name, None)
                    if event.type != "BOOKMARK" or self.problem:
                        self._show(changed)
                # The server ended the watch, as agreed. The pause is for a server that ends every watch at once.
                self._show(changed)
                await asyncio.sleep(self._first_s * self._rng.uniform(0.5, 1.0))
            except WatchExpired:
                version = None
                await asyncio.sleep(self._first_s * self._rng.uniform(0.5, 1.0))
            except ClusterError as error:
                failures += 1
                # The first failure of a watch is no problem, because proxies cut silent connections.
                if (failures > 1 or version is None) and self.problem != str(error):
                    self.problem = str(error)
                    changed()
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, RETRY_LAST_S)

    def _show(self, changed: Callable[[], None]) -> None:
        """Update the shown workers from the known pods, and clear the problem."""
        shown = [candidate for _, pod in sorted(self._pods.items()) for candidate in candidates_of(pod)]
        if self.problem or shown != self.shown:
            self.shown, self.problem = shown, ""
            changed()
