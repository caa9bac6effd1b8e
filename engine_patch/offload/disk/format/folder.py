# SPDX-License-Identifier: Apache-2.0
"""The folder of one identity within the folder that the user names: its owner, and its description for people.

    FOLDER/<digest of the identity>/identity.json   the identity of the records, for people; must be this engine's
                                    *.damaged       damaged files, for people: nothing reads them
                                    lock            locked while an engine writes here; contains its process id
                                    manifest        see manifest.py
                                    records         see records.py

Folders of other identities are never opened, and neither are other files in the user's folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path

from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity

IDENTITY_FILE = "identity.json"
LOCK_FILE = "lock"
DAMAGED_SUFFIX = ".damaged"
MANIFEST_FILE = "manifest"
RECORDS_FILE = "records"

# Prompts can be recovered from KV caches.
FOLDER_MODE = 0o700
LOCK_MODE = 0o600
# Bytes that suffice for a process id and the name of a host.
MAX_OWNER_BYTES = 512


class DiskFolderError(RuntimeError):
    """The error for a folder that cannot be used; its text gives the reason and the fix."""


class FolderInUse(DiskFolderError):
    """The error for a folder to which another engine writes."""


class ForeignFolder(DiskFolderError):
    """The error for a folder whose content contradicts its name."""


class Folder:
    """A folder that this process has claimed until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd

    def release(self) -> None:
        """Release the lock. The lock file stays, because a process that unlinks it cannot know whose lock it is."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def claim(root: Path, identity: DiskIdentity, option: str, log: logging.Logger) -> Folder:
    """Make and lock the folder of this identity.

    Args:
        root: The folder that the user names.
        identity: The identity of the records.
        option: The name of the setting to change, for the text of errors.
        log: Receives a warning about a damaged folder.

    Raises:
        FolderInUse: Another engine writes to the folder.
        ForeignFolder: The folder holds records of another identity.
        DiskFolderError: The folder cannot be written.
    """
    path = root / identity.folder_name()
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, LOCK_MODE)
    except OSError as error:
        raise unusable(path, error, option) from error
    try:
        _lock(path, lock_fd, option)
        _describe(path, identity, option, log)
    except OSError as error:
        os.close(lock_fd)
        raise unusable(path, error, option) from error
    except BaseException:
        os.close(lock_fd)
        raise
    return Folder(path, lock_fd)


def unusable(path: Path, error: OSError, option: str) -> DiskFolderError:
    """Return the error for a folder that the system does not let us use."""
    return DiskFolderError(
        f"{path}: the disk tier cannot use this folder ({error}): "
        f"make it writable for this user, or set {option} to a folder on a local file system that is"
    )


def foreign(path: Path, why: str, option: str) -> ForeignFolder:
    """Return the error for a folder that holds records of another identity."""
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


def _describe(path: Path, identity: DiskIdentity, option: str, log: logging.Logger) -> None:
    """Write identity.json, or check the existing one.

    A damaged one is set aside together with the manifest, because the identity of the records is then unknown. Raises
    ForeignFolder if the file is another identity's, and OSError.
    """
    text = identity.readable().encode()
    file = path / IDENTITY_FILE
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        _write_whole(file, text)
        return
    if data == text:
        return
    if _is_an_identity(data):
        raise foreign(path, f"{IDENTITY_FILE} describes another model or layout", option)
    # The manifest is first: a kill in between leaves a folder without records and a damaged description, which is
    # replaced later.
    for name in (MANIFEST_FILE, IDENTITY_FILE):
        _set_aside(path / name)
    _write_whole(file, text)
    log.warning(
        "kvrouter: %s is damaged (%d bytes that no engine has written): it and the manifest were renamed to *%s, the folder starts "
        "empty, and what it held is computed again",
        file,
        len(data),
        DAMAGED_SUFFIX,
    )


def _is_an_identity(data: bytes) -> bool:
    """Return whether an engine wrote this file, for any identity: the digest in it is that of the rest."""
    try:
        fields = json.loads(data)
        digest = fields.pop("digest")
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return False
    return bool(digest == hashlib.sha256(canonical).hexdigest())


def _set_aside(file: Path) -> None:
    """Rename the file, replacing one that was set aside before. Raise OSError."""
    try:
        file.replace(file.with_name(file.name + DAMAGED_SUFFIX))
    except FileNotFoundError:
        return


def _write_whole(file: Path, data: bytes) -> None:
    """Write the file completely or not at all, even if the machine loses its power. Raise OSError."""
    new_file = file.with_name(f"{file.name}.new")
    # A crash may have left this file, or it may be a link.
    new_file.unlink(missing_ok=True)
    with new_file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    new_file.replace(file)
    folder_fd = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)
