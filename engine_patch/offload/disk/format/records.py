# SPDX-License-Identifier: Apache-2.0
"""The payloads: one large file of records of one size, read and written directly from and to slots, and always checked.

Record i begins at i times the record's size rounded up to a page. The file grows with the highest record that was ever
written; no room is taken before. The manifest says which record holds which key. Different records may be read and
written by different threads at once.
"""

from __future__ import annotations

from kvrouter.engine_patch.offload.disk.format.checksum import Checksum
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps, read_fully, write_fully

# Bytes of a page of the page cache, and the alignment that direct I/O requires nearly everywhere.
PAGE_BYTES = 4_096


class Records:
    """The open file of payloads, each of `record_bytes`."""

    def __init__(self, files: FileOps, fd: int, record_bytes: int, checksum: Checksum) -> None:
        self._files = files
        self._fd = fd
        self._checksum = checksum
        self.record_bytes = record_bytes
        self.stride_bytes = stride_bytes(record_bytes)

    def write(self, index: int, data: memoryview) -> int:
        """Write `data`, which is `record_bytes` long, as record `index`, and return its checksum.

        Raises OSError; the content of the record is then undefined.
        """
        # The checksum is taken before the bytes are written: if they change meanwhile, the next read detects it.
        checksum = self._checksum(data)
        write_fully(self._files, self._fd, data, index * self.stride_bytes)
        return checksum

    def read(self, index: int, into: memoryview, checksum: int) -> bool:
        """Fill `into`, `record_bytes` long, and return whether it has that checksum; otherwise it holds anything.

        Raises OSError.
        """
        read_fully(self._files, self._fd, into, index * self.stride_bytes)
        return self._checksum(into) == checksum

    def read_page(self, index: int) -> None:
        """Read the first page of a record, only to test whether it can be read. Raise OSError if not."""
        into = memoryview(bytearray(min(PAGE_BYTES, self.record_bytes)))
        read_fully(self._files, self._fd, into, index * self.stride_bytes)

    def count(self) -> int:
        """Return the number of records that end within the file, whether or not they hold anything. Raise OSError."""
        return (self._files.size(self._fd) + self.stride_bytes - self.record_bytes) // self.stride_bytes

    def truncate(self, count: int) -> None:
        """Free the room of all records from number `count` on. Raise OSError."""
        if self._files.size(self._fd) > count * self.stride_bytes:
            self._files.truncate(self._fd, count * self.stride_bytes)

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)


def stride_bytes(record_bytes: int) -> int:
    """Return the bytes from the start of one record to the start of the next."""
    return -(-record_bytes // PAGE_BYTES) * PAGE_BYTES
