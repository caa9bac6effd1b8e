# SPDX-License-Identifier: Apache-2.0
"""A file beside a private store that says that workers are registered in it, so that a loss of the store's data is
noticed.

Valkey loads an append-only file without its manifest, or with a FLUSHDB in it, as an empty store without any error.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry

log = logging.getLogger(__name__)

FILE = "workers-registered"


class RegistrationMark:
    """The mark of one store. `problem` is not empty while the fleet is empty although it was not when the last router
    ended.

    Invariant: the file exists while any worker is registered, and also after the store lost them."""

    def __init__(self, registry: WorkerRegistry, folder: Path | None) -> None:
        """Read nothing yet. folder: the private store's; None: the store is shared, and other routers write back what
        it loses."""
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
            # Continue without the mark: nothing depends on it but noticing a loss. The next change tries again.
            log.warning("registrations not noted", extra={"file": self._path, "reason": str(error)})
            return
        self._is_set = not is_empty
