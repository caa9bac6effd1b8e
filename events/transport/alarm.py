# SPDX-License-Identifier: Apache-2.0
"""A pipe that wakes a thread from its poll."""

from __future__ import annotations

import contextlib
import os


class Alarm:
    """Poll its `fileno` for input. `ring` from any thread; the rest belongs to the polling one."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        # Objects, not bare descriptors: a write after `close` finds no descriptor, never another file's.
        self._read_end = os.fdopen(read_fd, "rb", buffering=0)
        self._write_end = os.fdopen(write_fd, "wb", buffering=0)

    def fileno(self) -> int:
        """Readable after `ring`."""
        return self._read_end.fileno()

    def ring(self) -> None:
        """Wakes the polling thread. Never blocks, never raises."""
        # A closed pipe: the thread is gone. A full one, where nothing is written: it is awake.
        with contextlib.suppress(OSError, ValueError):
            self._write_end.write(b"w")

    def silence(self) -> None:
        """Until the next `ring` it is not readable."""
        self._read_end.read(64)

    def close(self) -> None:
        """Frees the descriptors; `ring` then does nothing."""
        self._read_end.close()
        self._write_end.close()
