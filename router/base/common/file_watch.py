# SPDX-License-Identifier: Apache-2.0
"""Whether files are others than those that were read last.

By looking, as notices of a file system do not come from all mounts."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from kvrouter.router.base.common.regular_file import read_regular

# Device, inode, size and time of change: in-place writes, renames and exchanged links (a ConfigMap's) all change one of
# them.
_Stamp: TypeAlias = tuple[int, int, int, int]


class FileWatch:
    """One file, or several that belong together. A change counts once it was the same at two looks: what is written in
    place is not read while it is half there."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._read: list[_Stamp] | None = None
        self._seen: list[_Stamp] | None = None

    def due(self) -> bool:
        """Whether they are to be read now. Raises OSError where one is not there."""
        try:
            stamps = self._stamps()
        except OSError:
            self.forget()
            raise
        rests, self._seen = stamps == self._seen, stamps
        return rests and stamps != self._read

    def forget(self) -> None:
        """What was read counts as unread."""
        self._read = self._seen = None

    def begin(self) -> None:
        """To be called before they are read: what changes meanwhile is seen at the next look. Raises OSError."""
        self._read = self._stamps()

    def text(self, max_bytes: int) -> str:
        """Return what the first holds now. Raises OSError and UnicodeDecodeError."""
        self.begin()
        return read_regular(self._paths[0], max_bytes).decode("utf-8")

    def _stamps(self) -> list[_Stamp]:
        found = [path.stat() for path in self._paths]
        return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]
