# SPDX-License-Identifier: Apache-2.0
"""A log that is followed while it is rotated: no line is lost, and no step of the rotation ends the reading."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrouter.shadow.log_reader import LogReader

# Long enough for any machine; a passing test does not wait for it.
TIMEOUT_S = 30.0


def followed(log: Path, change: Callable[[], None], last: bytes) -> list[bytes]:
    """Return the lines that a reader hands out from `change` on, up to the line `last`."""

    async def follow() -> list[bytes]:
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        reader = LogReader(
            str(log),
            follow=True,
            on_line=lines.put_nowait,
            on_long=lambda: None,
            on_end=lambda problem: lines.put_nowait(b"end: " + problem.encode()),
        )
        reader.start(asyncio.get_running_loop())
        taken: list[bytes] = []
        try:
            change()
            async with asyncio.timeout(TIMEOUT_S):
                while last not in taken:
                    taken.append(await lines.get())
                    reader.done()
                    assert not taken[-1].startswith(b"end"), taken
        finally:
            reader.stop()
        return taken

    return asyncio.run(follow())


def test_a_path_that_is_missing_when_it_is_opened_again_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    opens = os.open
    missing = 3

    def opened(path: Any, flags: int, *more: int) -> int:
        nonlocal missing
        if missing and path == str(log):
            missing -= 1
            raise FileNotFoundError(2, "No such file or directory", path)
        return opens(path, flags, *more)

    def rotate() -> None:
        monkeypatch.setattr(os, "open", opened)
        log.rename(tmp_path / "log.1")
        log.write_bytes(b"after\n")

    assert followed(log, rotate, b"after") == [b"after"]
    assert not missing


def test_lines_written_just_before_a_rotation_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    is_replaced = LogReader._is_replaced
    rotated = False

    def replaced(reader: LogReader, file: Any) -> bool:
        """Write and rotate after the read that found the end, and before the look at the path."""
        nonlocal rotated
        # The thread of another test's reader may look at its own log once more.
        if reader._source == str(log) and not rotated:
            rotated = True
            with log.open("ab") as writer:
                writer.write(b"last\n")
            log.rename(tmp_path / "log.1")
            log.write_bytes(b"after\n")
        return is_replaced(reader, file)

    monkeypatch.setattr(LogReader, "_is_replaced", replaced)
    assert followed(log, lambda: None, b"after") == [b"last", b"after"]
