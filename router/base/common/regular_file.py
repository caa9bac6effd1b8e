# SPDX-License-Identifier: Apache-2.0
"""Reads files that others may replace while the router runs: only regular files, opened without waiting."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises OSError, also for anything that is not a regular file."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer, and opening a file under a lease waits for its holder.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a file. Raises OSError, also if it is not a regular file or has more than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            size_bytes = max(len(content), os.fstat(file.fileno()).st_size)
            raise OSError(errno.EFBIG, f"it has {size_bytes} bytes, and at most {max_bytes} are read", str(path))
        return content
