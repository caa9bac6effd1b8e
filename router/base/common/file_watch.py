# SPDX-License-Identifier: Apache-2.0
"""Detection of changed files by polling `stat`, because file system notices (inotify) do not come from all mounts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# Device, inode, size and time of modification. In-place writes, renames and exchanged links (as in a ConfigMap) each
# change at least one of them.
_Stamp: TypeAlias = tuple[int, int, int, int]


# The time for which a file must stay the same to be read at once. A program writes a small file in place within
# milliseconds, and a request that an engine refused waits for it.
SETTLE_S = 0.05


class FileWatch:
    """One file, or several that belong together, checked for changes since they were last read.

    A change counts once two successive polls see the same state, so that a file that is being written in place is not
    read half-written.
    """

    def __init__(self, *paths: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self._paths = paths
        self._sleep = sleep
        self._read: list[_Stamp] | None = None
        self._seen: list[_Stamp] | None = None

    def due(self, *, at_once: bool = False) -> bool:
        """Return whether the files should be read now. Raises OSError if one is missing.

        With `at_once`, a change counts even if this poll is the first that sees it, provided the files stay the same for
        SETTLE_S, which this call waits in its thread.
        """
        try:
            is_due = self._rests()
            if at_once and not is_due and self._seen != self._read:
                self._sleep(SETTLE_S)
                is_due = self._rests()
        except OSError:
            self.forget()
            raise
        return is_due

    def _rests(self) -> bool:
        """Poll the files; return whether they changed since they were read, and not since the poll before."""
        stamps = self._stamps()
        rests, self._seen = stamps == self._seen, stamps
        return rests and stamps != self._read

    def forget(self) -> None:
        """Treat the files as never read."""
        self._read = self._seen = None

    def begin(self) -> None:
        """Mark the current state as read; call it before reading, and `forget` if that fails. Raises OSError.

        A change during the read is thus seen at the next poll.
        """
        self._read = self._stamps()

    def _stamps(self) -> list[_Stamp]:
        results = [path.stat() for path in self._paths]
        return [(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns) for result in results]
