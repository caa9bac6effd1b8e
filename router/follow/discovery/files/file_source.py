# SPDX-License-Identifier: Apache-2.0
"""Workers from a watched file: the file of the setting `workers_file`, or the settings file.

This is the async shell around `FileWatch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.file_watch import FileWatch
from kvrouter.router.base.common.hanging_call import HANG_S, CallHangs, HangingCall
from kvrouter.router.follow.discovery.candidate import Candidate

# The interval of looks at the file. A change counts when it is the same at two looks, so it is registered within a
# second and a half. A look is one stat.
POLL_S = 0.5
# Enough for thousands of workers with catalogs; a larger file is no list of workers.
MAX_FILE_BYTES = 16 * 1024**2

# Returns the workers that a text lists, or None if the text has no list of workers. Raises SettingError.
Read: TypeAlias = Callable[[str], Sequence[Candidate] | None]


class FileSource:
    """The workers that a file lists. A file that cannot be read, or is wrong, leaves the last list unchanged."""

    def __init__(self, name: str, path: Path, read: Read, *, poll_s: float = POLL_S, hang_s: float = HANG_S) -> None:
        """Read nothing yet.

        Args:
            name: The source's name.
            path: The file.
            read: Reads the file's text; called in a thread.
            poll_s: The interval of looks at the file, in seconds.
            hang_s: How many seconds reading the file may take before that is a problem.
        """
        self.name = name
        self.shown: Sequence[Candidate] | None = None
        self.problem = ""
        # The problem that the last look found that got an answer.
        self._file_problem = ""
        self._path = path
        self._read = read
        self._poll_s = poll_s
        self._watch = FileWatch(path)
        self._hang_s = hang_s
        self._changed = HangingCall(f"read {name}", self._read_changed)

    def begin(self) -> None:
        """Read the file for the first time. Raises SettingError if it is wrong, which ends the router's start."""
        try:
            self.shown = HangingCall(f"read {self.name}", self._content).wait(self._hang_s)
        except CallHangs:
            raise SettingError(f"{self._hang()}; name a readable file") from None

    async def run(self, changed: Callable[[], None]) -> None:
        """Look at the file every `poll_s` until cancelled; call `changed` when the list or the problem changed."""
        while True:
            await asyncio.sleep(self._poll_s)
            before = self.shown, self.problem
            await self.look()
            if before != (self.shown, self.problem):
                changed()

    async def look(self) -> None:
        """Take over the file's contents if they changed."""
        try:
            contents = await self._changed.result(self._hang_s)
        except CallHangs:
            self.problem = f"{self._hang()}; restore its mount, or put it back"
            return
        except SettingError as error:
            self._file_problem = error.message
        except OSError as error:
            self._file_problem = f"cannot read {self._path}: {error.strerror or error}; put it back"
        else:
            for content in contents:
                # A settings file that no longer has a list of workers counts as an empty list.
                self.shown = () if content is None and self.shown is not None else content
                self._file_problem = ""
        # A file that has not changed has the problem that it had before it hung.
        self.problem = self._file_problem

    def _read_changed(self) -> list[Sequence[Candidate] | None]:
        """Return the new content as the only element, or an empty list if the file has not changed."""
        return [self._content()] if self._watch.due() else []

    def _content(self) -> Sequence[Candidate] | None:
        try:
            text = self._watch.text(MAX_FILE_BYTES)
        except UnicodeDecodeError:
            raise SettingError(f"{self._path} is not UTF-8; write it as text") from None
        except OSError as error:
            raise SettingError(f"cannot read {self._path}: {error.strerror or error}; name a readable file") from None
        return self._read(text)

    def _hang(self) -> str:
        return f"cannot read {self._path}: no answer in {self._hang_s:g} s"
