# SPDX-License-Identifier: Apache-2.0
"""A read-only view of a folder that another process writes: the changes of its manifest since the last look, and reads.

It works only on the writer's machine, because the writer's data is seen through the page cache; the check reveals an
entry that is being written. Runs in the I/O threads: `look` in one at a time, `read` in several.
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
    """The result of one look at a manifest."""

    # Whether the files are other ones than at the last look, so that all entries are listed.
    fresh: bool = False
    # The generation, or None without a valid header.
    generation: int | None = None
    # (record, its present entry or None) of each change since the last look.
    changed: Sequence[tuple[int, Entry | None]] = ()
    # The reason why the look found nothing, or None.
    problem: str | None = None
    # Whether the folder does not exist yet, which is no error.
    missing: bool = False


class View:
    """The folder of one identity within the folder that the user names; it may not exist yet."""

    def __init__(self, root: Path, identity: DiskIdentity, files: FileOps) -> None:
        """Do not open the folder yet. Raise ValueError for a checksum that is not available."""
        checksum(identity.checksum)
        self._path = root / identity.folder_name()
        self._identity = identity
        self._files = files
        self._opened: _Opened | None = None

    def look(self) -> ManifestLook:
        """Return the changes since the last look; never raise."""
        try:
            is_fresh = self._open()
            assert self._opened is not None
            generation = self._opened.manifest.read_header()
            return ManifestLook(is_fresh, generation, self._opened.changes())
        except FileNotFoundError:
            return ManifestLook(
                problem=f"{self._path} is not there: no engine of this model has written yet", missing=True
            )
        except ForeignManifest as error:
            return ManifestLook(problem=f"{self._path} holds records of something else ({error})")
        except Exception as error:
            return ManifestLook(problem=failure(error).reason)

    def read(self, entry: Entry, into: memoryview) -> Result:
        """Fill `into` with the payload of the entry's record; never raise."""
        opened = self._opened
        if opened is None:
            return Result(RecordOutcome.FAILED, f"{self._path} was never opened")
        try:
            result = read_record(opened.manifest, opened.records, entry.key, entry.record, entry.generation, into)
            # The writer may reuse a record for another key at any time; it first voids the entry that points to it.
            if result.outcome is RecordOutcome.CORRUPT and opened.manifest.get(entry.record) != entry:
                return Result(RecordOutcome.REUSED, f"record {entry.record} was given to another key")
            return result
        except Exception as error:
            return failure(error)

    def _open(self) -> bool:
        """Open the files, or the files that replaced them, and return whether any were opened."""
        status = (self._path / MANIFEST_FILE).stat()
        inode = (status.st_dev, status.st_ino)
        if self._opened is not None and self._opened.inode == inode:
            return False
        self._opened = _Opened(self._path, self._identity, self._files, inode)
        return True


class _Opened:
    """The two files, closed when the last read of them has ended."""

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
        # The manifest as the last look saw it, in pieces of SCAN_BYTES.
        self._seen: list[bytes] = []

    def changes(self) -> list[tuple[int, Entry | None]]:
        """Return (record, its present entry or None) of each change since the last call.

        Raises OSError; the next call then returns the same changes.
        """
        changed: list[tuple[int, Entry | None]] = []
        pieces: list[bytes] = []
        size = self._files.size(self._manifest_fd)
        for start in range(HEADER_BYTES, size, SCAN_BYTES):
            data = bytearray(min(SCAN_BYTES, size - start))
            read_fully(self._files, self._manifest_fd, memoryview(data), start)
            # The last entry may be cut short.
            pieces.append(bytes(data) + bytes(-len(data) % ENTRY_BYTES))
        for number in range(max(len(pieces), len(self._seen))):
            present = pieces[number] if number < len(pieces) else b""
            former = self._seen[number] if number < len(self._seen) else b""
            if present == former:
                continue
            first = number * (SCAN_BYTES // ENTRY_BYTES)
            for offset in range(0, max(len(present), len(former)), ENTRY_BYTES):
                entry = present[offset : offset + ENTRY_BYTES]
                if entry != former[offset : offset + ENTRY_BYTES]:
                    index = first + offset // ENTRY_BYTES
                    changed.append((index, decode_entry(entry, index)))
        self._seen = pieces
        return changed


def _close(files: FileOps, fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            files.close(fd)
