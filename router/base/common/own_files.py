# SPDX-License-Identifier: Apache-2.0
"""This process's own files in a folder that others may be able to write to, opened without following a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE = 0o600


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user and return its descriptor; with O_CREAT, make it. Raises OSError for anything else.

    A link, or another user's file, would make this process write elsewhere; a FIFO would block it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise OSError(None, "it is no plain file with this name alone; remove it")
        if info.st_uid != os.geteuid():
            raise OSError(None, f"it belongs to the user with id {info.st_uid}; remove it or change its owner")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path) -> bytes:
    """Return the contents of a file of this user, opened by `open_own`. Raises OSError."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_own(path: Path, content: bytes) -> None:
    """Replace the contents of a file of this user, opened by `open_own`. Raises OSError."""
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate()
        file.write(content)
