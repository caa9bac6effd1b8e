# SPDX-License-Identifier: Apache-2.0
"""What files hold, read again when they change. What cannot be used changes nothing: the former goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvrouter.router.access.access_metrics import AccessMetrics
from kvrouter.router.common.errors import SettingError
from kvrouter.router.common.file_watch import FileWatch

log = logging.getLogger(__name__)

T = TypeVar("T")


class Reloaded(Generic[T]):
    """`value` is what was read last without an error, `problem` why it is not what the files hold now; both are
    replaced, never changed, so any thread may read them."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T], metrics: AccessMetrics) -> None:
        """Reads for the first time. name: as metrics have it. read: raises OSError and SettingError. Raises
        SettingError."""
        self._name = name
        self._read = read
        self._metrics = metrics
        self._watch = FileWatch(*paths)
        self.problem = ""
        metrics.stale.labels(name).set(0)
        for outcome in ("taken", "refused"):
            metrics.reloads.labels(name, outcome)
        try:
            self._watch.begin()
            self.value = read()
        except OSError as error:
            raise SettingError(f"cannot read {_place(error)}; name a readable file") from None

    def look(self) -> bool:
        """Whether there is another value since. Blocks for as long as the files do."""
        try:
            if not self._watch.due():
                return False
            self._watch.begin()
            value = self._read()
        except OSError as error:
            # Read again as soon as it can be, whether or not it changed.
            self._watch.forget()
            self._refuse(f"cannot read {_place(error)}; put it back")
            return False
        except SettingError as error:
            self._refuse(error.message)
            return False
        self.value, self.problem = value, ""
        self._metrics.stale.labels(self._name).set(0)
        self._metrics.reloads.labels(self._name, "taken").inc()
        log.info("read again", extra={"file": self._name})
        return True

    def _refuse(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self._metrics.stale.labels(self._name).set(1)
        self._metrics.reloads.labels(self._name, "refused").inc()
        log.warning("a file cannot be used; the former is", extra={"file": self._name, "problem": problem})


def _place(error: OSError) -> str:
    return f"{error.filename}: {error.strerror or error}"
