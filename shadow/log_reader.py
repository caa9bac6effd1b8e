# SPDX-License-Identifier: Apache-2.0
"""The lines of a log as they are written: of a file, a pipe or stdin, in a thread, because a pipe cannot be waited for
otherwise.

Bounds: MAX_LINES that are read and not done yet, each of MAX_LINE_BYTES; then the thread waits.
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
# As long as a mirrored body may be, and escaped.
MAX_LINE_BYTES = 64 << 20
# How soon a line is seen in a file that grows.
POLL_S = 0.1


class LogReader:
    """follow: go on at the end of the file, as `tail -F` does, from its present end; a file that is replaced or cut is
    read from its beginning. on_line: called on the loop; its line counts as done with `done`. on_end: after the last
    line, with what ended it, empty at the end of the file. on_long: for a line that is too long."""

    def __init__(
        self,
        source: str,
        *,
        follow: bool,
        on_line: Callable[[bytes], None],
        on_long: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Raises OSError where the file cannot be opened."""
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
        # A daemon: what waits for a pipe cannot be ended.
        threading.Thread(target=self._run, args=(loop,), daemon=True, name="log").start()

    def done(self) -> None:
        """One line is."""
        self._permits.release()

    def stop(self) -> None:
        self._pause.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        problem = ""
        try:
            self._read(loop)
        except OSError as error:
            problem = str(error)
        except RuntimeError:
            # The loop is closed: nobody reads on.
            return
        try:
            loop.call_soon_threadsafe(self._on_end, problem)
        except RuntimeError:
            return

    def _opened(self) -> BinaryIO:
        return os.fdopen(os.open(self._source, os.O_RDONLY), "rb")

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # A named pipe opens once somebody writes.
        file = self._file or self._opened()
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
            else:
                self._pause.wait(POLL_S)
                if self._is_replaced(file):
                    file.close()
                    file = self._opened()
                    pending.clear()

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Whether the name means another file by now, or the file was cut."""
        try:
            there = Path(self._source).stat()
        except FileNotFoundError:
            # Between the two steps of a rotation.
            return False
        here = os.fstat(file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or here.st_size < file.tell()
