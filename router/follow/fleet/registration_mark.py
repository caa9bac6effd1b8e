# SPDX-License-Identifier: Apache-2.0
"""A file beside a private store, which marks that workers are registered in the store.

The mark reveals a loss of the store's data. Valkey loads an append-only file without its manifest, or with a FLUSHDB in
it, as an empty store without any error.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry

log = logging.getLogger(__name__)

FILE = "workers-registered"


class RegistrationMark:
    """The mark of one store.

    Invariant: the file exists while any worker is registered, and also after the store lost the registrations.
    """

    def __init__(self, registry: WorkerRegistry, folder: Path | None) -> None:
        """Read nothing yet.

        Args:
            registry: The registered workers.
            folder: The folder of the private store; None if the store is shared, where other routers write back lost
                registrations.
        """
        self._registry = registry
        self._path = None if folder is None else folder / FILE
        self._is_set = False
        # Not empty while no worker is registered, although some were when the last router ended.
        self.problem = ""
        registry.subscribe(members=self._on_members)

    def compare(self) -> None:
        """Set `problem` if the registry that was loaded at the start is empty and the mark exists."""
        if self._path is None or self._is_set or not self._path.exists():
            return
        self.problem = (
            f"no worker is registered, although some were when a router last used {self._path.parent}: its store lost them "
            f"(a missing manifest in appendonlydir, or a FLUSHDB); register them again, or delete {self._path}"
        )
        log.error("registrations lost", extra={"reason": self.problem})

    def _on_members(self, worker: WorkerKey | None) -> None:
        is_empty = not (self._registry.followers or self._registry.left_out)
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
            # Continue without the mark, because it only serves to notice a loss. The next change tries again.
            log.warning("registrations not noted", extra={"file": self._path, "reason": str(error)})
            return
        self._is_set = not is_empty
