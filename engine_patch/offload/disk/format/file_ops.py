# SPDX-License-Identifier: Apache-2.0
"""The system calls of the disk tier's two files, in one small object that a test can replace by one that fails.

Every call may raise OSError. Buffers are read and written where they lie, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# KV caches are as private as the prompts they were made of.
FILE_MODE = 0o600


class FileOps:
    """The real ones."""

    def open(self, path: Path) -> int:
        """Return a descriptor for reading and writing. Create the file if it does not exist, and refuse a link."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def open_to_read(self, path: Path) -> int:
        """A descriptor for reading a file that is there."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes."""
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Bytes read: fewer than requested at the end of the file, or at the system's discretion."""
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Bytes written: maybe fewer than given."""
        return os.pwritev(fd, [data], offset)


def read_fully(files: FileOps, fd: int, into: memoryview, offset: int) -> None:
    """Fills `into`. Raises OSError, also where the file ends before."""
    done = 0
    while done < len(into):
        count = files.pread(fd, into[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, {len(into) - done} bytes early")
        done += count


def write_fully(files: FileOps, fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data`. Raises OSError, also where the system takes no more and gives no reason."""
    done = 0
    while done < len(data):
        count = files.pwrite(fd, data[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"nothing was written at byte {offset + done}, {len(data) - done} bytes short")
        done += count
