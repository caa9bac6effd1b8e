# SPDX-License-Identifier: Apache-2.0
"""Values that are read from files, and read again when the files change or on SIGHUP.

The previous value stays in use while the files are unusable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.base.common.file_watch import FileWatch
from kvrouter.router.base.common.hanging_call import HANG_S, CallHangs, HangingCall
from kvrouter.router.base.common.regular_file import read_regular

# Imported for types only, because a wrong file is refused before the packages of a router are imported.
if TYPE_CHECKING:
    from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")

# The time between two checks of a file. A change counts once two checks in a row see it; a check is one `stat` per file.
POLL_S = 0.5


def read_text(file: Path, max_bytes: int) -> str:
    """Return the text of a file. Raises OSError, and SettingError if it is not UTF-8."""
    try:
        return read_regular(file, max_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise SettingError(f"{file} is not UTF-8; write it as text") from None


# The outcomes of a change of a file.
TAKEN, REFUSED = "taken", "refused"


class ReloadMetrics:
    """The metrics of files that are read again. Their prefix `access_` is older than the files of other parts."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.stale = registry.gauge(
            "access_file_stale", "1 while what a file holds now cannot be used, and the former is", "file"
        )
        self.reloads = registry.counter(
            "access_reloads_total", "Changes of files, by what came of them", "file", "outcome"
        )


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
        metrics: ReloadMetrics | None,
        *,
        former: T | None = None,
        hang_s: float = HANG_S,
    ) -> None:
        """Read the value for the first time. Raises SettingError unless there is a former value.

        Args:
            name: The value's name in metrics and logs.
            paths: The files to watch.
            read: Reads the files; raises OSError and SettingError. It runs in a thread and may hang.
            metrics: The metrics of files, or None to count nothing.
            former: The value to use if the files cannot be used now, or None to raise SettingError then.
            hang_s: The seconds after which a read that has not finished is reported as a problem.
        """
        self._name = name
        self._paths = paths
        self._read = read
        self._metrics = metrics
        self._hang_s = hang_s
        self._watch = FileWatch(*paths)
        self._changed = HangingCall(f"read {name}", self._read_changed)
        self._looking = asyncio.Lock()
        # Whether the present look reads a change even if it is the first to see it.
        self._at_once = False
        # The looks with `at_once` so far that have ended.
        self._looks_at_once = 0
        # Whether the last look that ended got no answer.
        self._hangs = False
        self._subscribers: list[Callable[[], None]] = []
        # Set to have the files read at once, changed or not.
        self.wanted = asyncio.Event()
        # Whether `ReloadedFiles.problems` includes this file's problem; if not, another part of the router reports it.
        self.is_reported = True
        self.problem = ""
        # The problem that the last look found, not counting looks at which reading hung.
        self._file_problem = ""
        self._show_stale()
        if metrics is not None:
            for outcome in (TAKEN, REFUSED):
                metrics.reloads.labels(name, outcome)
        try:
            self.value = self._first()
        except SettingError as error:
            if former is None:
                raise
            self.value, self._file_problem = former, error.message
            self._refuse(error.message)

    def _first(self) -> T:
        """Return the value that the files have at the start. Raises SettingError."""
        try:
            return HangingCall(f"read {self._name}", self._read_now).wait(self._hang_s)
        except OSError as error:
            self._watch.forget()
            raise SettingError(f"cannot read {_place(error)}; name a readable file") from None
        except CallHangs:
            raise SettingError(f"{self._hang()}; name a readable file") from None

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever `value` or `problem` has changed."""
        self._subscribers.append(changed)

    async def look(self, *, at_once: bool = False) -> bool:
        """Read the files again if they changed, and return whether there is a new value.

        A failure sets `problem` and returns False. With `at_once`, a change counts even if this look is the first that
        sees it. Calls with `at_once` share the look under way, and do not wait for files that hung at the last look.
        """
        if not at_once:
            async with self._looking:
                return await self._look(at_once=False)
        looks_before = self._looks_at_once
        if self._hangs:
            return False
        async with self._looking:
            # While this call waited, another one may have looked, or found that the files hang.
            if self._hangs or self._looks_at_once != looks_before:
                return False
            has_new_value = await self._look(at_once=True)
            self._looks_at_once += 1
            return has_new_value

    async def read_again(self) -> None:
        """Read the files now, changed or not."""
        async with self._looking:
            self._watch.forget()
            await self._look(at_once=True)

    async def _look(self, *, at_once: bool) -> bool:
        """Do what `look` does, with a look of its own. Call it with the lock."""
        self._at_once = at_once
        before = self.problem
        has_new_value = await self._read_if_changed()
        if has_new_value or self.problem != before:
            for changed in self._subscribers:
                changed()
        return has_new_value

    async def _read_if_changed(self) -> bool:
        """Do what `_look` does, without calling the subscribers."""
        self._hangs = False
        try:
            values = await self._changed.result(self._hang_s)
        except CallHangs:
            self._hangs = True
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
        self._show_stale(TAKEN)
        log.info("read again", extra={"file": self._name})
        return True

    def _read_changed(self) -> list[T]:
        """Return a list with the new value, or an empty list if no file has changed."""
        try:
            return [self._read_now()] if self._watch.due(at_once=self._at_once) else []
        except OSError:
            # The next look reads the files again, even if they do not change.
            self._watch.forget()
            raise

    def _read_now(self) -> T:
        self._watch.begin()
        try:
            return self._read()
        except (OSError, SettingError):
            raise
        except Exception as error:
            # An unforeseen fault of one file must not end the watch of all. Its text may quote a key.
            log.error(
                "a file was read with an error of the router", extra={"file": self._name, "error": type(error).__name__}
            )
            places = ", ".join(map(str, self._paths))
            raise SettingError(f"cannot use {places} ({type(error).__name__}): undo its last change") from None

    def _hang(self) -> str:
        return f"cannot read {', '.join(map(str, self._paths))}: no answer in {self._hang_s:g} s"

    def _answers_again(self) -> None:
        """Restore the earlier problem, if any: reading no longer hangs, and the files have not changed."""
        self.problem = self._file_problem
        self._show_stale()
        log.info("answers again, unchanged", extra={"file": self._name})

    def _show_stale(self, outcome: str = "") -> None:
        """Set the metric of stale files, and count the outcome of a change, if there was one."""
        if self._metrics is not None:
            self._metrics.stale.labels(self._name).set(int(bool(self.problem)))
            if outcome:
                self._metrics.reloads.labels(self._name, outcome).inc()

    def _refuse(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self._show_stale(REFUSED)
        log.warning(
            "a file cannot be used; its former content stays in use", extra={"file": self._name, "problem": problem}
        )


def _place(error: OSError) -> str:
    return f"{error.filename}: {error.strerror or error}"


class ReloadedFiles:
    """All files of a process that are read again."""

    def __init__(self, metrics: ReloadMetrics | None) -> None:
        self._metrics = metrics
        self._files: list[Reloaded[Any]] = []

    def add(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        former: T | None = None,
        hang_s: float = HANG_S,
    ) -> Reloaded[T]:
        """Read a value for the first time and return it. Raises SettingError. The arguments are those of `Reloaded`."""
        file = Reloaded(name, paths, read, self._metrics, former=former, hang_s=hang_s)
        self._files.append(file)
        return file

    @property
    def problems(self) -> list[str]:
        """One message per file whose current content cannot be used, so that its previous content stays in force."""
        return [f"{file.problem}; the former is used" for file in self._files if file.problem and file.is_reported]

    async def watch(self) -> None:
        """Check all files for changes forever. A file that hangs does not delay the others."""
        async with asyncio.TaskGroup() as group:
            for file in self._files:
                group.create_task(_follow(file))
        # Wait forever if there are no files: the supervisor treats a task that ends as a failure.
        await asyncio.Event().wait()

    def wake(self) -> None:
        """Have `watch` read all files now, changed or not."""
        for file in self._files:
            file.wanted.set()


async def _follow(file: Reloaded[Any]) -> None:
    while True:
        if await set_within(file.wanted, POLL_S):
            file.wanted.clear()
            await file.read_again()
        else:
            await file.look()
