# SPDX-License-Identifier: Apache-2.0
"""A pipe that wakes a thread from its poll."""

from __future__ import annotations

import contextlib
import os


class Alarm:
    """A pipe whose `fileno` is polled for input. Any thread may call `ring`; the rest belongs to the polling thread."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        # Objects, not bare descriptors: a write after `close` fails, instead of reaching another file's descriptor.
        self._read_end = os.fdopen(read_fd, "rb", buffering=0)
        self._write_end = os.fdopen(write_fd, "wb", buffering=0)

    def fileno(self) -> int:
        """Return the descriptor that is readable after `ring`."""
        return self._read_end.fileno()

    def ring(self) -> None:
        """Wake the polling thread. Never blocks, never raises."""
        # If the pipe is closed, the thread is gone. If it is full, nothing is written and the thread is awake.
        with contextlib.suppress(OSError, ValueError):
            self._write_end.write(b"w")

    def silence(self) -> None:
        """Make the descriptor unreadable until the next `ring`."""
        self._read_end.read(64)

    def close(self) -> None:
        """Free the descriptors. After this, `ring` does nothing."""
        self._read_end.close()
        self._write_end.close()
