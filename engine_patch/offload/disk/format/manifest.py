# SPDX-License-Identifier: Apache-2.0
"""The manifest: which key each record of the folder holds, in fixed-size entries that survive a kill at any moment.

A write of a record first voids its entry, then writes the payload, then the entry: whenever a process is killed, each
existing entry describes a complete payload. Checksums detect data that a machine lost with its power: the entry's
checksum here, the payload's (which the entry holds) at every read. All numbers are little-endian.

Header, at byte 0, HEADER_BYTES long, zeros after its fields:

| bytes | field | meaning |
|---|---|---|
| 8 | magic | `KVRDISKM` |
| 4 | format version | `identity.FORMAT_VERSION` |
| 4 | entry bytes | 128 |
| 8 | record bytes | payload of one record |
| 8 | generation | entries of another generation are void: to clear the folder is to write one number |
| 32 | identity digest | SHA-256 of the canonical identity |
| 4 | check | CRC-32 of the fields above |

Entry of record i, at HEADER_BYTES + 128 * i; all zeros: void:

| bytes | field | meaning |
|---|---|---|
| 4 | magic | `KVRE` |
| 1 | key bytes | 12 to 68 |
| 3 | | zeros |
| 8 | record | i: an entry in a wrong place is invalid |
| 8 | generation | the header's at the time of the write |
| 8 | seq | grows with every write to the folder: the order of age |
| 8 | payload checksum | by the algorithm that the identity names |
| 72 | key | block hash and group index, zeros after them |
| 12 | | zeros |
| 4 | check | CRC-32 of the 124 bytes before |

A header with a wrong check makes every entry void. Nothing is synced except after a clear: a kill loses nothing that
the system has accepted, and checksums detect a power cut.
"""

from __future__ import annotations

import struct
import threading
import zlib
from typing import NamedTuple

from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps, read_fully, write_fully
from kvrouter.engine_patch.offload.disk.format.identity import FORMAT_VERSION
from kvrouter.engine_patch.offload.key import GROUP_BYTES, MAX_HASH_BYTES, MIN_HASH_BYTES, OffloadKey

HEADER_MAGIC = b"KVRDISKM"
# One page, so that entries never share one with the header.
HEADER_BYTES = 4_096
ENTRY_MAGIC = b"KVRE"
ENTRY_BYTES = 128
KEY_ROOM_BYTES = 72
# Bytes that are read at once at the start: 8,192 entries.
SCAN_BYTES = 8_192 * ENTRY_BYTES

_HEADER = struct.Struct("<8sIIQQ32s")
_ENTRY = struct.Struct(f"<4sB3xQQQQ{KEY_ROOM_BYTES}s12x")
_CHECK = struct.Struct("<I")
_VOID = bytes(ENTRY_BYTES)


class Entry(NamedTuple):
    """The entry that says that record number `record` holds `key`."""

    key: OffloadKey
    record: int
    generation: int
    seq: int
    # Checksum of the payload.
    checksum: int


class Scan(NamedTuple):
    """The content of a manifest."""

    entries: list[Entry]
    # Records whose entry is torn or damaged.
    corrupt: list[int]
    # A seq above every seq of the file.
    next_seq: int


class ForeignManifest(Exception):
    """The error for a manifest that belongs to records of another identity."""


def encode_entry(entry: Entry) -> bytes:
    """Return the entry's ENTRY_BYTES bytes."""
    body = _ENTRY.pack(
        ENTRY_MAGIC, len(entry.key), entry.record, entry.generation, entry.seq, entry.checksum, entry.key
    )
    return body + _CHECK.pack(zlib.crc32(body))


def decode_entry(data: bytes, index: int) -> Entry | None:
    """Return the entry of record `index`, or None unless every field is valid. `data` is (ENTRY_BYTES,)."""
    body = data[: _ENTRY.size]
    if _CHECK.pack(zlib.crc32(body)) != data[_ENTRY.size :]:
        return None
    magic, key_bytes, record, generation, seq, checksum, key = _ENTRY.unpack(body)
    if magic != ENTRY_MAGIC or record != index:
        return None
    if not MIN_HASH_BYTES + GROUP_BYTES <= key_bytes <= MAX_HASH_BYTES + GROUP_BYTES:
        return None
    return Entry(OffloadKey(key[:key_bytes]), index, generation, seq, checksum)


class Manifest:
    """The open manifest file.

    One thread calls `scan` and `truncate`, before all other methods. Only one entry of a record is written at a time.
    """

    def __init__(self, files: FileOps, fd: int, digest: bytes, record_bytes: int) -> None:
        self._files = files
        self._fd = fd
        self._digest = digest
        self._record_bytes = record_bytes
        self.generation = 0
        # An I/O thread may write the header again while a clear changes it.
        self._header_lock = threading.Lock()

    def scan(self) -> Scan:
        """Read header and entries; must be called first.

        A file that is new, or whose header is damaged, gets a header with a generation that no entry has. Raises
        ForeignManifest and OSError.
        """
        generation = self.read_header()
        entries: list[Entry] = []
        corrupt: list[int] = []
        newest = -1
        top_generation = 0
        for index, data in self._raw_entries():
            entry = decode_entry(data, index)
            if entry is None:
                corrupt.append(index)
                continue
            newest = max(newest, entry.seq)
            top_generation = max(top_generation, entry.generation)
            if entry.generation == generation:
                entries.append(entry)
            elif generation is None:
                corrupt.append(index)
        if generation is None:
            generation = top_generation + 1
            self.set_generation(generation)
        self.generation = generation
        return Scan(entries, corrupt, newest + 1)

    def set_generation(self, generation: int) -> None:
        """Make entries of every other generation void.

        Raises OSError; a later start may then find entries that were to be void.
        """
        with self._header_lock:
            self.generation = generation
            self._write_header()

    def write_header(self) -> None:
        """Write the present header again. Raise OSError."""
        with self._header_lock:
            self._write_header()

    def sync(self) -> None:
        """Wait until all that was written is on the medium. Raise OSError."""
        self._files.sync(self._fd)

    def get(self, index: int) -> Entry | None:
        """Return the entry of a record, or None if it is invalid. Raise OSError."""
        data = bytearray(ENTRY_BYTES)
        read_fully(self._files, self._fd, memoryview(data), _place(index))
        return decode_entry(bytes(data), index)

    def put(self, entry: Entry) -> None:
        """Write the entry of a record. Raise OSError; the entry may then be torn, which the next start detects."""
        write_fully(self._files, self._fd, memoryview(encode_entry(entry)), _place(entry.record))

    def void(self, index: int) -> None:
        """Void the entry of a record. Raise OSError."""
        write_fully(self._files, self._fd, memoryview(_VOID), _place(index))

    def truncate(self, records: int) -> None:
        """Remove all entries from record number `records` on. Raise OSError."""
        if self._files.size(self._fd) > _place(records):
            self._files.truncate(self._fd, _place(records))

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)

    def _write_header(self) -> None:
        fields = _HEADER.pack(
            HEADER_MAGIC, FORMAT_VERSION, ENTRY_BYTES, self._record_bytes, self.generation, self._digest
        )
        data = (fields + _CHECK.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")
        write_fully(self._files, self._fd, memoryview(data), 0)

    def read_header(self) -> int | None:
        """Return the generation, or None without a valid header. Raise ForeignManifest and OSError."""
        if self._files.size(self._fd) < HEADER_BYTES:
            return None
        data = bytearray(HEADER_BYTES)
        read_fully(self._files, self._fd, memoryview(data), 0)
        fields, check = bytes(data[: _HEADER.size]), bytes(data[_HEADER.size : _HEADER.size + _CHECK.size])
        if _CHECK.pack(zlib.crc32(fields)) != check:
            return None
        magic, version, entry_bytes, record_bytes, generation, digest = _HEADER.unpack(fields)
        expected = (HEADER_MAGIC, FORMAT_VERSION, ENTRY_BYTES, self._record_bytes, self._digest)
        if (magic, version, entry_bytes, record_bytes, digest) != expected:
            raise ForeignManifest(f"format {version}, {record_bytes} bytes a record, identity {digest.hex()}")
        return int(generation)

    def _raw_entries(self) -> list[tuple[int, bytes]]:
        """Return (record, bytes) of all entries that are not void; a truncated last entry is padded with zeros."""
        entries = []
        size = self._files.size(self._fd)
        for start in range(HEADER_BYTES, size, SCAN_BYTES):
            data = bytearray(min(SCAN_BYTES, size - start))
            read_fully(self._files, self._fd, memoryview(data), start)
            data += bytes(-len(data) % ENTRY_BYTES)
            first = (start - HEADER_BYTES) // ENTRY_BYTES
            for offset in range(0, len(data), ENTRY_BYTES):
                entry = bytes(data[offset : offset + ENTRY_BYTES])
                if entry != _VOID:
                    entries.append((first + offset // ENTRY_BYTES, entry))
        return entries


def _place(index: int) -> int:
    return HEADER_BYTES + ENTRY_BYTES * index
