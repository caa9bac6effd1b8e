# SPDX-License-Identifier: Apache-2.0
"""Workers from a file that is watched: the file of `workers_file`, or the settings file. The async shell around
`FileWatch`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from kvrouter.router.common.errors import SettingError
from kvrouter.router.common.file_watch import FileWatch
from kvrouter.router.discovery.candidate import Candidate

# A change counts when it has been there for one of these, so it is registered within a second and a half. A look is one
# stat.
POLL_S = 0.5
# Thousands of workers with catalogs; what is larger is no list of workers.
MAX_FILE_BYTES = 16 * 1024**2

# The workers that a text lists; None: it says nothing of workers. Raises SettingError.
Read: TypeAlias = Callable[[str], Sequence[Candidate] | None]


class FileSource:
    """A file that cannot be read, or is wrong, changes nothing."""

    def __init__(self, name: str, path: Path, read: Read, *, poll_s: float = POLL_S) -> None:
        self.name = name
        self.shown: Sequence[Candidate] | None = None
        self.problem = ""
        self._path = path
        self._read = read
        self._poll_s = poll_s
        self._watch = FileWatch(path)

    def begin(self) -> None:
        """Read it for the first time: a wrong one ends the start. Raises SettingError."""
        self.shown = self._content()

    async def run(self, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            before = self.shown, self.problem
            # In a thread: a mount of the network may stand still.
            await asyncio.to_thread(self._look)
            if before != (self.shown, self.problem):
                changed()

    def _look(self) -> None:
        try:
            if self._watch.due():
                found = self._content()
                # A settings file that no longer names workers names none.
                self.shown = () if found is None and self.shown is not None else found
                self.problem = ""
        except SettingError as error:
            self.problem = error.message
        except OSError as error:
            self.problem = f"cannot read {self._path}: {error.strerror or error}; put it back"

    def _content(self) -> Sequence[Candidate] | None:
        try:
            size_bytes = self._path.stat().st_size
            if size_bytes > MAX_FILE_BYTES:
                raise SettingError(f"{self._path} has {size_bytes} bytes; at most {MAX_FILE_BYTES} are read")
            text = self._watch.text()
        except UnicodeDecodeError:
            raise SettingError(f"{self._path} is not UTF-8; write it as text") from None
        except OSError as error:
            raise SettingError(f"cannot read {self._path}: {error.strerror or error}; name a readable file") from None
        return self._read(text)
