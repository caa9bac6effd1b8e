# SPDX-License-Identifier: Apache-2.0
"""The system calls on the disk tier's two files, in one small object that a test can replace by one that fails.

Every call may raise OSError. Buffers are read and written in place, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# KV caches are as private as the prompts from which they were made.
FILE_MODE = 0o600


class FileOps:
    """The real system calls."""

    def open(self, path: Path) -> int:
        """Return a descriptor for reading and writing. Create the file if it does not exist, and refuse a link."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def open_to_read(self, path: Path) -> int:
        """Return a descriptor for reading an existing file."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the file's size in bytes."""
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        """Set the file's size in bytes."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Wait until the file's data is on the medium."""
        os.fdatasync(fd)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read into the buffer; return the bytes read: fewer at the end of the file or at the system's discretion."""
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write the data, and return the bytes written, which may be fewer."""
        return os.pwritev(fd, [data], offset)


def read_fully(files: FileOps, fd: int, into: memoryview, offset: int) -> None:
    """Fill `into`. Raise OSError on failure, and also if the file ends too early."""
    done = 0
    while done < len(into):
        count = files.pread(fd, into[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, {len(into) - done} bytes early")
        done += count


def write_fully(files: FileOps, fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. Raise OSError on failure, and also if the system takes no more bytes without a reason."""
    done = 0
    while done < len(data):
        count = files.pwrite(fd, data[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"nothing was written at byte {offset + done}, {len(data) - done} bytes short")
        done += count
