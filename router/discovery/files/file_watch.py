# SPDX-License-Identifier: Apache-2.0
"""Whether a file is another than the one that was read last.

By looking, as notices of a file system do not come from all mounts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

# Device, inode, size and time of change: in-place writes, renames and exchanged links (a ConfigMap's) all change one of
# them.
_Stamp: TypeAlias = tuple[int, int, int, int]


class FileWatch:
    """A change counts once it was the same at two looks: what is written in place is not read while it is half
    there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: _Stamp | None = None
        self._seen: _Stamp | None = None

    def due(self) -> bool:
        """Whether it is to be read now. Raises OSError where it is not there."""
        try:
            stamp = self._stamp()
        except OSError:
            self._read = self._seen = None
            raise
        rests, self._seen = stamp == self._seen, stamp
        return rests and stamp != self._read

    def text(self) -> str:
        """What it holds now. Raises OSError and UnicodeDecodeError."""
        # Before: what changes meanwhile is seen at the next look.
        self._read = self._stamp()
        return self._path.read_text(encoding="utf-8")

    def _stamp(self) -> _Stamp:
        found = self._path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
