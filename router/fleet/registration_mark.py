# SPDX-License-Identifier: Apache-2.0
"""Notes beside a private store that workers are registered in it, so that a store that lost its data is noticed.

An append-only file without its manifest, or with a FLUSHDB in it, is loaded as an empty store without any error.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.fleet.worker_registry import WorkerRegistry

log = logging.getLogger(__name__)

FILE = "workers-registered"


class RegistrationMark:
    """`problem` is not empty while the fleet is empty that was not at the end of the last router.

    Invariant: the file is there while any worker is registered, and after its store lost them."""

    def __init__(self, registry: WorkerRegistry, folder: Path | None) -> None:
        """folder: of the private store; None: the store is shared, and other routers write back what it loses."""
        self._registry = registry
        self._path = None if folder is None else folder / FILE
        self._is_set = False
        self.problem = ""
        registry.subscribe(members=self._on_members)

    def compare(self) -> None:
        """Judge the registry that the start loaded."""
        if self._path is None or self._is_set or not self._path.exists():
            return
        self.problem = (
            f"no worker is registered, although some were when a router last used {self._path.parent}: its store lost them "
            f"(a missing manifest in appendonlydir, or a FLUSHDB); register them again, or delete {self._path}"
        )
        log.error("registrations lost", extra={"reason": self.problem})

    def _on_members(self, worker: WorkerKey | None) -> None:
        is_empty = not (self._registry.streams or self._registry.left_out)
        if not is_empty:
            self.problem = ""
        if self._path is None or self._is_set is not is_empty:
            return
        try:
            if is_empty:
                self._path.unlink(missing_ok=True)
            else:
                self._path.touch()
        except OSError as error:
            # Without it, a loss is not noticed: nothing else depends on it. Tried again with the next change.
            log.warning("registrations not noted", extra={"file": self._path, "reason": str(error)})
            return
        self._is_set = not is_empty
