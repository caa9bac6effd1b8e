# SPDX-License-Identifier: Apache-2.0
"""The lines of a log as they are written, from a file, a pipe or stdin.

A thread reads them, as there is no other way to wait for a pipe. At most MAX_LINES lines of at most MAX_LINE_BYTES are
read and not done; beyond that, the thread waits.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

STDIN = "-"
MAX_LINES = 16
# A line can have a mirrored body of the largest size, escaped.
MAX_LINE_BYTES = 64 << 20
# The delay until a new line in a growing file is seen.
POLL_S = 0.1


class LogReader:
    """A thread that reads one log and hands its lines to the event loop, until the log ends or `stop`.

    A file that is followed is read from its present end on, as by `tail -F`; if it is replaced or cut, the reader
    continues at its beginning.
    """

    def __init__(
        self,
        source: str,
        *,
        # Whether to continue at the end of a file.
        follow: bool,
        # Called on the loop with each line, which counts against MAX_LINES until `done`.
        on_line: Callable[[bytes], None],
        # Called for a line that is too long.
        on_long: Callable[[], None],
        # Called after the last line with the problem that ended the log, empty at the end of the file.
        on_end: Callable[[str], None],
    ) -> None:
        """Open the log. Raises OSError if the file cannot be opened."""
        self._source = source
        self._file: BinaryIO | None = sys.stdin.buffer if source == STDIN else None
        mode = os.fstat(self._file.fileno()).st_mode if self._file is not None else Path(source).stat().st_mode
        is_regular = stat.S_ISREG(mode)
        if self._file is None and (is_regular or stat.S_ISDIR(mode)):
            self._file = self._opened()
        self._follows = follow and is_regular
        self.grows = self._follows or not is_regular
        if self._follows and self._file is not None:
            self._file.seek(0, os.SEEK_END)
        self._on_line = on_line
        self._on_long = on_long
        self._on_end = on_end
        self._permits = threading.Semaphore(MAX_LINES)
        self._pause = threading.Event()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to read; callbacks run on `loop`."""
        # The thread is a daemon, as a thread that waits for a pipe cannot be ended.
        threading.Thread(target=self._run, args=(loop,), daemon=True, name="log").start()

    def done(self) -> None:
        """Note that one line has been handled."""
        self._permits.release()

    def stop(self) -> None:
        """Stop reading; a thread that waits for a pipe stops after its next line."""
        self._pause.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        problem = ""
        try:
            self._read(loop)
        except OSError as error:
            problem = str(error)
        except RuntimeError:
            # The loop is closed, so no one handles further lines.
            return
        try:
            loop.call_soon_threadsafe(self._on_end, problem)
        except RuntimeError:
            return

    def _opened(self) -> BinaryIO:
        return os.fdopen(os.open(self._source, os.O_RDONLY), "rb")

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # A named pipe opens once another process writes to it.
        file = self._file or self._opened()
        # The file that has replaced `file`, whose rest is read first.
        successor: BinaryIO | None = None
        try:
            pending = bytearray()
            is_long = False
            while not self._pause.is_set():
                part = file.readline(MAX_LINE_BYTES)
                if part.endswith(b"\n") or (not part and not self._follows):
                    line = bytes(pending + part).strip()
                    pending.clear()
                    if is_long:
                        loop.call_soon_threadsafe(self._on_long)
                    elif line:
                        self._permits.acquire()
                        loop.call_soon_threadsafe(self._on_line, line)
                    is_long = False
                    if not part:
                        return
                elif part:
                    is_long = is_long or len(pending) + len(part) > MAX_LINE_BYTES
                    pending = bytearray() if is_long else pending + part
                elif successor is not None:
                    file.close()
                    file, successor = successor, None
                    pending.clear()
                    is_long = False
                elif not self._pause.wait(POLL_S):
                    successor = self._successor(file)
        finally:
            for opened in (file, successor):
                if opened is not None and self._source != STDIN:
                    opened.close()

    def _successor(self, file: BinaryIO) -> BinaryIO | None:
        """Return the file at the path if it is another one by now, or was cut, opened at its beginning."""
        try:
            return self._opened() if self._is_replaced(file) else None
        except FileNotFoundError:
            # The path can be missing between the two steps of a rotation, also after the look at it.
            return None

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Return whether the path names another file by now, or the file was cut. Raises FileNotFoundError."""
        named = Path(self._source).stat()
        opened = os.fstat(file.fileno())
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino) or opened.st_size < file.tell()
