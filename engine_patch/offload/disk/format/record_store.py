# SPDX-License-Identifier: Apache-2.0
"""Manifest and records together: the operations on one record, in an order that a kill at any moment cannot harm.

`write`, `read`, `sync` and `trial` run in the I/O threads and never raise: errors are part of their result. Only one of
them uses a record at a time, except that there may be several reads of it.
"""

from __future__ import annotations

import contextlib
import errno
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from kvrouter.engine_patch.offload.disk.format.checksum import checksum
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.folder import MANIFEST_FILE, RECORDS_FILE
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity
from kvrouter.engine_patch.offload.disk.format.manifest import Entry, Manifest
from kvrouter.engine_patch.offload.disk.format.records import Records
from kvrouter.engine_patch.offload.key import OffloadKey

# No space on the device, over the user's quota, or beyond the largest file of the file system or of the process.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RecordOutcome(Enum):
    """The outcome of an operation on a record."""

    DONE = 0
    # The bytes that were read are not the bytes that had been written.
    CORRUPT = 1
    NO_SPACE = 2
    FAILED = 3
    # A reader found that the engine that writes the folder has given the record to another key.
    REUSED = 4


class Result(NamedTuple):
    """The outcome of an operation, with a reason for people unless it is DONE."""

    outcome: RecordOutcome
    reason: str = ""


DONE = Result(RecordOutcome.DONE)


class Found(NamedTuple):
    """The records found at the start."""

    # (key, record), oldest first.
    held: list[tuple[OffloadKey, int]]
    # Number of records for which the file has room.
    records: int
    next_seq: int
    corrupt: int
    evicted: int


class Store:
    """The two open files of a claimed folder."""

    def __init__(self, manifest: Manifest, records: Records) -> None:
        self._manifest = manifest
        self._records = records

    @classmethod
    def open(cls, path: Path, identity: DiskIdentity, files: FileOps) -> Store:
        """Open the files. Raise OSError, and ValueError for a checksum that is not available."""
        check = checksum(identity.checksum)
        manifest_fd = files.open(path / MANIFEST_FILE)
        try:
            records_fd = files.open(path / RECORDS_FILE)
        except BaseException:
            files.close(manifest_fd)
            raise
        return cls(
            Manifest(files, manifest_fd, identity.digest(), identity.record_bytes),
            Records(files, records_fd, identity.record_bytes, check),
        )

    @property
    def generation(self) -> int:
        """The generation of entries that are valid."""
        return self._manifest.generation

    def recover(self, max_records: int) -> Found:
        """Return the records that earlier processes left, within `max_records`.

        If there are more, the oldest are dropped. Remaining records behind the new end of the file are moved, which
        takes as long as reading and writing them. Raises OSError and ForeignManifest.
        """
        scan = self._manifest.scan()
        count = self._records.count()
        useless = list(scan.corrupt)
        corrupt = len(scan.corrupt)
        newest: dict[OffloadKey, Entry] = {}
        for entry in sorted(scan.entries, key=lambda entry: entry.seq):
            if entry.record >= count:
                useless.append(entry.record)
                corrupt += 1
                continue
            # A key may occur twice if a move was cut short, or if an old entry could not be voided.
            if (older := newest.pop(entry.key, None)) is not None:
                useless.append(older.record)
            newest[entry.key] = entry
        entries = list(newest.values())
        evicted = max(0, len(entries) - max_records)
        useless += [entry.record for entry in entries[:evicted]]
        for index in useless:
            if index < max_records:
                self._manifest.void(index)
        held, lost = self._moved_in(entries[evicted:], max_records)
        self._manifest.truncate(max_records)
        self._records.truncate(max_records)
        return Found(held, min(count, max_records), scan.next_seq, corrupt + lost, evicted)

    def write(self, key: OffloadKey, index: int, generation: int, seq: int, data: memoryview) -> Result:
        """Write a record's payload and its entry."""
        try:
            self._manifest.void(index)
            payload_checksum = self._records.write(index, data)
            self._manifest.put(Entry(key, index, generation, seq, payload_checksum))
        except Exception as error:
            # The entry may be half written.
            self._give_up(index)
            return failure(error)
        return DONE

    def read(self, key: OffloadKey, index: int, generation: int, into: memoryview) -> Result:
        """Read a record into the buffer.

        A record that cannot be read is voided, so that the next start does not find it.
        """
        try:
            result = read_record(self._manifest, self._records, key, index, generation, into)
        except Exception as error:
            result = failure(error)
        if result.outcome is not RecordOutcome.DONE:
            self._give_up(index)
        return result

    def clear(self, generation: int) -> Result:
        """Void every entry. If that fails, the next `trial` tries again."""
        try:
            self._manifest.set_generation(generation)
        except Exception as error:
            return failure(error)
        return DONE

    def sync(self) -> Result:
        """Wait until a clear is on the medium, so that a power cut restores nothing."""
        try:
            self._manifest.sync()
        except Exception as error:
            return failure(error)
        return DONE

    def trial(self, index: int | None) -> Result:
        """Test whether the disk takes and returns bytes again.

        `index` is a record that should be readable, or None. The header is written again, too.
        """
        try:
            self._manifest.write_header()
            self._manifest.sync()
            if index is not None:
                self._records.read_page(index)
        except Exception as error:
            return failure(error)
        return DONE

    def close(self) -> None:
        """Close both files, ignoring failures: the checksum reveals data that was not written."""
        for file in (self._manifest, self._records):
            with contextlib.suppress(OSError):
                file.close()

    def _give_up(self, index: int) -> None:
        # If this fails too, the payload's checksum still guards the next start.
        with contextlib.suppress(Exception):
            self._manifest.void(index)

    def _moved_in(self, entries: list[Entry], max_records: int) -> tuple[list[tuple[OffloadKey, int]], int]:
        """Move records into the first `max_records`.

        Returns:
            (key, record) of all remaining entries, and the number of entries that could not be moved.
        """
        used = {entry.record for entry in entries}
        free = (index for index in range(max_records) if index not in used)
        held, lost = [], 0
        buffer = memoryview(bytearray(self._records.record_bytes))
        for entry in entries:
            index = entry.record
            if index >= max_records:
                index = next(free)
                if not self._move(entry, index, buffer):
                    lost += 1
                    continue
            held.append((entry.key, index))
        return held, lost

    def _move(self, entry: Entry, index: int, buffer: memoryview) -> bool:
        result = self.read(entry.key, entry.record, entry.generation, buffer)
        if result.outcome is RecordOutcome.DONE:
            result = self.write(entry.key, index, entry.generation, entry.seq, buffer)
        return result.outcome is RecordOutcome.DONE


def read_record(
    manifest: Manifest, records: Records, key: OffloadKey, index: int, generation: int, into: memoryview
) -> Result:
    """Fill `into` with the payload of a record, and check that the record holds that key. Raise OSError."""
    entry = manifest.get(index)
    if entry is None or entry.key != key or entry.generation != generation:
        return Result(RecordOutcome.CORRUPT, f"the manifest entry of record {index} is damaged")
    if not records.read(index, into, entry.checksum):
        return Result(RecordOutcome.CORRUPT, f"the payload of record {index} is damaged")
    return DONE


def failure(error: Exception) -> Result:
    """Return the result for an error."""
    full = isinstance(error, OSError) and error.errno in NO_SPACE
    return Result(RecordOutcome.NO_SPACE if full else RecordOutcome.FAILED, str(error) or repr(error))
