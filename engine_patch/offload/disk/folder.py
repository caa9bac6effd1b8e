# SPDX-License-Identifier: Apache-2.0
"""The folder of one identity within the folder that the user names: who owns it, and what is said in it for people.

    FOLDER/<digest of the identity>/identity.json   what the records are of, for people; must be ours
                                    lock            locked while an engine writes here; its process id within
                                    manifest        see manifest.py
                                    records         see records.py

Folders of other identities are never opened, neither is anything else that lies there.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvrouter.engine_patch.offload.disk.identity import DiskIdentity

IDENTITY_FILE = "identity.json"
LOCK_FILE = "lock"
MANIFEST_FILE = "manifest"
RECORDS_FILE = "records"

# Prompts can be told from KV caches.
FOLDER_MODE = 0o700
LOCK_MODE = 0o600
# A process id and the name of a host.
MAX_OWNER_BYTES = 512


class DiskFolderError(RuntimeError):
    """The folder cannot be used; the text says why and what to do."""


class FolderInUse(DiskFolderError):
    """Another engine writes there."""


class ForeignFolder(DiskFolderError):
    """Its content is not what its name says."""


class Folder:
    """A claimed folder: ours until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd

    def release(self) -> None:
        """The lock file stays: who unlinked it could not tell whose lock it is."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def claim(root: Path, identity: DiskIdentity, option: str) -> Folder:
    """Makes and locks the folder of this identity. option: the name of the setting to change, for the text of errors.

    Raises FolderInUse, ForeignFolder, and DiskFolderError for a folder that cannot be written."""
    path = root / identity.folder_name()
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
    except OSError as error:
        raise unusable(path, error, option) from error
    try:
        _lock(path, lock_fd, option)
        _describe(path, identity, option)
    except OSError as error:
        os.close(lock_fd)
        raise unusable(path, error, option) from error
    except BaseException:
        os.close(lock_fd)
        raise
    return Folder(path, lock_fd)


def unusable(path: Path, error: OSError, option: str) -> DiskFolderError:
    """The error for a folder that the system does not let us use."""
    return DiskFolderError(
        f"{path}: the disk tier cannot use this folder ({error}): "
        f"make it writable for this user, or set {option} to a folder on a local file system that is"
    )


def foreign(path: Path, why: str, option: str) -> ForeignFolder:
    return ForeignFolder(
        f"{path} holds records of something else ({why}); they were left as they are: "
        f"remove the folder if nothing needs it, or set {option} to another one"
    )


def _lock(path: Path, lock_fd: int, option: str) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock_fd, MAX_OWNER_BYTES, 0).decode(errors="replace").strip() or "unknown, it is just starting"
        raise FolderInUse(
            f"{path} is in use by another engine (process {owner}), and only one may write there: "
            f"set {option} to another folder for this engine, also for each data-parallel rank, or let it read only"
        ) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)


def _describe(path: Path, identity: DiskIdentity, option: str) -> None:
    """Writes identity.json, whole or not at all; raises ForeignFolder for one that is not ours."""
    text = identity.readable()
    file = path / IDENTITY_FILE
    try:
        if file.read_text() != text:
            raise foreign(path, f"{IDENTITY_FILE} is of another identity", option)
    except FileNotFoundError:
        fresh = path / f"{IDENTITY_FILE}.new"
        fresh.write_text(text)
        fresh.replace(file)
