# SPDX-License-Identifier: Apache-2.0
"""A folder of records as another process writes them: what changed in its manifest since the last look, and reads.
Writes nothing.

Only on the machine of the writer: what it writes is seen through the page cache, and the check
reveals an entry that is being written. Runs in the I/O threads: `look` in one at a time, `read` in several.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvrouter.engine_patch.offload.disk.format.checksum import checksum
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps, read_fully
from kvrouter.engine_patch.offload.disk.format.folder import MANIFEST_FILE, RECORDS_FILE
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity
from kvrouter.engine_patch.offload.disk.format.manifest import (
    ENTRY_BYTES,
    HEADER_BYTES,
    SCAN_BYTES,
    Entry,
    ForeignManifest,
    Manifest,
    decode_entry,
)
from kvrouter.engine_patch.offload.disk.format.record_store import RecordOutcome, Result, failure, read_record
from kvrouter.engine_patch.offload.disk.format.records import Records


class ManifestLook(NamedTuple):
    """fresh: these are other files than those of the last look, and all entries are listed; generation: None, while
    there is no valid header; changed: (record, what it holds now) since the last look; problem: None, or why
    there is nothing."""

    fresh: bool = False
    generation: int | None = None
    changed: Sequence[tuple[int, Entry | None]] = ()
    problem: str | None = None
    # The folder is not there yet, which is no error.
    missing: bool = False


class View:
    """One identity's folder in the folder that the user names; it need not be there yet."""

    def __init__(self, root: Path, identity: DiskIdentity, files: FileOps) -> None:
        """Raises ValueError for a checksum that is not there."""
        checksum(identity.checksum)
        self._path = root / identity.folder_name()
        self._identity = identity
        self._files = files
        self._opened: _Opened | None = None

    def look(self) -> ManifestLook:
        """Never raises."""
        try:
            fresh = self._open()
            assert self._opened is not None
            generation = self._opened.manifest.read_header()
            return ManifestLook(fresh, generation, self._opened.changes())
        except FileNotFoundError:
            return ManifestLook(
                problem=f"{self._path} is not there: no engine of this model has written yet", missing=True
            )
        except ForeignManifest as error:
            return ManifestLook(problem=f"{self._path} holds records of something else ({error})")
        except Exception as error:
            return ManifestLook(problem=failure(error).reason)

    def read(self, entry: Entry, into: memoryview) -> Result:
        """Fills `into` with what the entry names. Never raises."""
        opened = self._opened
        if opened is None:
            return Result(RecordOutcome.FAILED, f"{self._path} was never opened")
        try:
            result = read_record(opened.manifest, opened.records, entry.key, entry.record, entry.generation, into)
            # The writer gives a record to another key whenever it likes, and voids the entry first.
            if result.outcome is RecordOutcome.CORRUPT and opened.manifest.get(entry.record) != entry:
                return Result(RecordOutcome.REUSED, f"record {entry.record} was given to another key")
            return result
        except Exception as error:
            return failure(error)

    def _open(self) -> bool:
        """Opens the files, or those that took their place; whether it did."""
        found = (self._path / MANIFEST_FILE).stat()
        inode = (found.st_dev, found.st_ino)
        if self._opened is not None and self._opened.inode == inode:
            return False
        self._opened = _Opened(self._path, self._identity, self._files, inode)
        return True


class _Opened:
    """The two files, closed when the last read of them is over."""

    def __init__(self, path: Path, identity: DiskIdentity, files: FileOps, inode: tuple[int, int]) -> None:
        self.inode = inode
        self._files = files
        fds: list[int] = []
        weakref.finalize(self, _close, files, fds)
        for name in (MANIFEST_FILE, RECORDS_FILE):
            fds.append(files.open_to_read(path / name))
        self._manifest_fd = fds[0]
        self.manifest = Manifest(files, fds[0], identity.digest(), identity.record_bytes)
        self.records = Records(files, fds[1], identity.record_bytes, checksum(identity.checksum))
        # The manifest as the last look saw it, SCAN_BYTES apart.
        self._seen: list[bytes] = []

    def changes(self) -> list[tuple[int, Entry | None]]:
        """Raises OSError, and has then seen nothing."""
        changed: list[tuple[int, Entry | None]] = []
        seen: list[bytes] = []
        size = self._files.size(self._manifest_fd)
        for start in range(HEADER_BYTES, size, SCAN_BYTES):
            data = bytearray(min(SCAN_BYTES, size - start))
            read_fully(self._files, self._manifest_fd, memoryview(data), start)
            # The last entry may be cut short.
            seen.append(bytes(data) + bytes(-len(data) % ENTRY_BYTES))
        for number in range(max(len(seen), len(self._seen))):
            now = seen[number] if number < len(seen) else b""
            before = self._seen[number] if number < len(self._seen) else b""
            if now == before:
                continue
            first = number * (SCAN_BYTES // ENTRY_BYTES)
            for at in range(0, max(len(now), len(before)), ENTRY_BYTES):
                entry = now[at : at + ENTRY_BYTES]
                if entry != before[at : at + ENTRY_BYTES]:
                    index = first + at // ENTRY_BYTES
                    changed.append((index, decode_entry(entry, index)))
        self._seen = seen
        return changed


def _close(files: FileOps, fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            files.close(fd)
