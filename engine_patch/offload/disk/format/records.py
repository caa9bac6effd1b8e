# SPDX-License-Identifier: Apache-2.0
"""The payloads: one large file of records of one size, read and written where the slots lie, checked at every read.

Record i begins at i times the record's size rounded up to a page. The file grows with the highest record that was ever
written; no room is taken before. What lies in which record stands in the manifest. Different records may be read and
written by different threads at once.
"""

from __future__ import annotations

from kvrouter.engine_patch.offload.disk.format.checksum import Checksum
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps, read_fully, write_fully

# Pages of the page cache, and the alignment that direct I/O requires nearly everywhere.
PAGE_BYTES = 4_096


class Records:
    """The open file. record_bytes: of a payload."""

    def __init__(self, files: FileOps, fd: int, record_bytes: int, checksum: Checksum) -> None:
        self._files = files
        self._fd = fd
        self._checksum = checksum
        self.record_bytes = record_bytes
        self.stride_bytes = stride_bytes(record_bytes)

    def write(self, index: int, data: memoryview) -> int:
        """Writes record_bytes of `data` and returns their checksum. Raises OSError; the record then holds anything."""
        # Before they are written: if they change meanwhile, the next read detects it.
        checksum = self._checksum(data)
        write_fully(self._files, self._fd, data, index * self.stride_bytes)
        return checksum

    def read(self, index: int, into: memoryview, checksum: int) -> bool:
        """Fills `into`, record_bytes long; whether it has that checksum: else it holds anything. Raises OSError."""
        read_fully(self._files, self._fd, into, index * self.stride_bytes)
        return self._checksum(into) == checksum

    def read_page(self, index: int) -> None:
        """Whether that record can be read at all. Raises OSError."""
        into = memoryview(bytearray(min(PAGE_BYTES, self.record_bytes)))
        read_fully(self._files, self._fd, into, index * self.stride_bytes)

    def count(self) -> int:
        """Records that end within the file, whether or not they hold anything. Raises OSError."""
        return (self._files.size(self._fd) + self.stride_bytes - self.record_bytes) // self.stride_bytes

    def truncate(self, count: int) -> None:
        """Gives the room of all records from that one on back. Raises OSError."""
        if self._files.size(self._fd) > count * self.stride_bytes:
            self._files.truncate(self._fd, count * self.stride_bytes)

    def close(self) -> None:
        self._files.close(self._fd)


def stride_bytes(record_bytes: int) -> int:
    """From one record to the next."""
    return -(-record_bytes // PAGE_BYTES) * PAGE_BYTES
