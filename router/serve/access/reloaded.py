# SPDX-License-Identifier: Apache-2.0
"""Values that are read from files, and read again when these change.

The previous value stays in use while the files are unusable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.file_watch import FileWatch
from kvrouter.router.base.common.hanging_call import HANG_S, CallHangs, HangingCall
from kvrouter.router.serve.access.access_metrics import AccessMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")


class Reloaded(Generic[T]):
    """A value that is read from files.

    `value` is the last one that was read without an error. `problem` says why it differs from the files' current
    content, or is empty. Both are replaced, never changed in place, so any thread may read them.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        metrics: AccessMetrics,
        *,
        hang_s: float = HANG_S,
    ) -> None:
        """Read the value for the first time. Raises SettingError.

        Args:
            name: The value's name in metrics and logs.
            paths: The files to watch.
            read: Reads the files; raises OSError and SettingError. It runs in a thread and may hang.
            metrics: The metrics of access.
            hang_s: The seconds that reading may take before that is a problem.
        """
        self._name = name
        self._paths = paths
        self._read = read
        self._metrics = metrics
        self._hang_s = hang_s
        self._watch = FileWatch(*paths)
        self._changed = HangingCall(f"read {name}", self._read_changed)
        self.problem = ""
        # The problem that the last look found that got an answer.
        self._file_problem = ""
        metrics.stale.labels(name).set(0)
        for outcome in ("taken", "refused"):
            metrics.reloads.labels(name, outcome)
        try:
            self.value = HangingCall(f"read {name}", self._read_now).wait(hang_s)
        except OSError as error:
            raise SettingError(f"cannot read {_place(error)}; name a readable file") from None
        except CallHangs:
            raise SettingError(f"{self._hang()}; name a readable file") from None

    async def look(self) -> bool:
        """Read the files again if they changed, and return whether there is a new value.

        A failure sets `problem` and returns False.
        """
        try:
            values = await self._changed.result(self._hang_s)
        except CallHangs:
            self._refuse(f"{self._hang()}; restore its mount, or put it back")
            return False
        except OSError as error:
            self._file_problem = f"cannot read {_place(error)}; put it back"
            self._refuse(self._file_problem)
            return False
        except SettingError as error:
            self._file_problem = error.message
            self._refuse(self._file_problem)
            return False
        if not values:
            if self.problem != self._file_problem:
                self._answers_again()
            return False
        [self.value] = values
        self.problem = self._file_problem = ""
        self._metrics.stale.labels(self._name).set(0)
        self._metrics.reloads.labels(self._name, "taken").inc()
        log.info("read again", extra={"file": self._name})
        return True

    def _read_changed(self) -> list[T]:
        """Return a list with the new value, or an empty list if no file has changed."""
        try:
            return [self._read_now()] if self._watch.due() else []
        except OSError:
            # The next look reads the files again, even if they do not change.
            self._watch.forget()
            raise

    def _read_now(self) -> T:
        self._watch.begin()
        return self._read()

    def _hang(self) -> str:
        return f"cannot read {', '.join(map(str, self._paths))}: no answer in {self._hang_s:g} s"

    def _answers_again(self) -> None:
        """Note that the files hung and have not changed: they have the problem that they had before."""
        self.problem = self._file_problem
        self._metrics.stale.labels(self._name).set(int(bool(self.problem)))
        log.info("answers again, unchanged", extra={"file": self._name})

    def _refuse(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self._metrics.stale.labels(self._name).set(1)
        self._metrics.reloads.labels(self._name, "refused").inc()
        log.warning("a file cannot be used; the former is", extra={"file": self._name, "problem": problem})


def _place(error: OSError) -> str:
    return f"{error.filename}: {error.strerror or error}"
