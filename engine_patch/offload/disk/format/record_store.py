# SPDX-License-Identifier: Apache-2.0
"""Manifest and records together: what is done for one record, in the order that a kill at any moment cannot harm.

`write`, `read`, `sync` and `trial` run in the I/O threads and never raise: what went wrong is their result. A record is
used by one of them at a time, but for reads, of which there may be several.
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

# No space on the device, over the user's quota, beyond the largest file of the file system or of the process.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RecordOutcome(Enum):
    DONE = 0
    # What was read is not what had been written.
    CORRUPT = 1
    NO_SPACE = 2
    FAILED = 3
    # Of a reader: the engine that writes the folder has given the record to another key.
    REUSED = 4


class Result(NamedTuple):
    """reason: for people, where it is not DONE."""

    outcome: RecordOutcome
    reason: str = ""


DONE = Result(RecordOutcome.DONE)


class Found(NamedTuple):
    """What the start has found. held: (key, record), oldest first; records: how many the file has room for."""

    held: list[tuple[OffloadKey, int]]
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
        """Raises OSError; ValueError for a checksum that is not there."""
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
        return self._manifest.generation

    def recover(self, max_records: int) -> Found:
        """What earlier processes left, within `max_records`. Raises OSError, ForeignManifest.

        Where there is more, the oldest go; survivors that lie behind the new end of the file are moved, which takes as
        long as to read and write them."""
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
            # Twice, where a move was cut short, or an old entry could not be voided.
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
        try:
            self._manifest.void(index)
            payload_checksum = self._records.write(index, data)
            self._manifest.put(Entry(key, index, generation, seq, payload_checksum))
        except Exception as error:
            # The entry may be half there.
            self._give_up(index)
            return failure(error)
        return DONE

    def read(self, key: OffloadKey, index: int, generation: int, into: memoryview) -> Result:
        """A record that cannot be read is voided: the next start shall not find it."""
        try:
            result = read_record(self._manifest, self._records, key, index, generation, into)
        except Exception as error:
            result = failure(error)
        if result.outcome is not RecordOutcome.DONE:
            self._give_up(index)
        return result

    def clear(self, generation: int) -> Result:
        """Every entry is void. Where that fails, the next `trial` tries again."""
        try:
            self._manifest.set_generation(generation)
        except Exception as error:
            return failure(error)
        return DONE

    def sync(self) -> Result:
        """A clear is on the medium: a power cut brings nothing back."""
        try:
            self._manifest.sync()
        except Exception as error:
            return failure(error)
        return DONE

    def trial(self, index: int | None) -> Result:
        """Whether the disk takes and gives bytes again. index: of a record that should be readable."""
        try:
            self._manifest.write_header()
            self._manifest.sync()
            if index is not None:
                self._records.read_page(index)
        except Exception as error:
            return failure(error)
        return DONE

    def close(self) -> None:
        """Ignores failures: the checksum reveals whatever was not written."""
        for file in (self._manifest, self._records):
            with contextlib.suppress(OSError):
                file.close()

    def _give_up(self, index: int) -> None:
        # Where this fails too, the payload's checksum still guards the next start.
        with contextlib.suppress(Exception):
            self._manifest.void(index)

    def _moved_in(self, entries: list[Entry], max_records: int) -> tuple[list[tuple[OffloadKey, int]], int]:
        """(key, record) of all, each within `max_records`, and how many could not be moved."""
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
    """Whether the record holds that key, and `into` its payload. Raises OSError."""
    entry = manifest.get(index)
    if entry is None or entry.key != key or entry.generation != generation:
        return Result(RecordOutcome.CORRUPT, f"the manifest entry of record {index} is damaged")
    if not records.read(index, into, entry.checksum):
        return Result(RecordOutcome.CORRUPT, f"the payload of record {index} is damaged")
    return DONE


def failure(error: Exception) -> Result:
    """An error as a result."""
    full = isinstance(error, OSError) and error.errno in NO_SPACE
    return Result(RecordOutcome.NO_SPACE if full else RecordOutcome.FAILED, str(error) or repr(error))
