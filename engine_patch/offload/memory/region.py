# SPDX-License-Identifier: Apache-2.0
"""The CPU memory of the offload tier: slots of equal size, mapped by every rank of a node and by the scheduler process.

The order is slot-major: slot i is | rank 0 | rank 1 | ... |, padded to whole pages of memory, so that one slot is one
record on disk and starts at an address to which a device may write. The memory is a file under /dev/shm, or private to
the process if no other process needs it.

A file is in use as long as a process holds a lock on it, and the kernel drops a lock with its holder, however the
holder ends. So the last process to close a region removes the file, and the next engine that starts removes a file that
a killed engine left. This module does not decide who writes which slot when: two users of one slot are a fault of their
callers.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import urllib.parse
from pathlib import Path
from typing import Any

log = logging.getLogger("vllm.kvrouter.offload")

# Whole pages of memory, which are also whole sectors: disk I/O that bypasses the page cache requires both ends to be
# aligned to them.
SLOT_ALIGNMENT = 4_096

DEFAULT_FOLDER = Path("/dev/shm")
FILE_PREFIX = "kvrouter-offload-"
FILE_SUFFIX = ".slots"

# A file that is removed between its opening and its locking is opened again; each time another process starts or ends.
OPEN_TRIES = 100

# vLLM registers host memory in pieces of this size too (0.32 v1/kv_offload/cpu/gpu_worker.py), because drivers refuse
# more at a time.
PIN_BYTES = 64 * 2**30

ADVICE = (
    "lower cpu_bytes_to_use in kv_connector_extra_config, or give the machine more of it (a container's /dev/shm: "
    "docker run --shm-size)"
)


def shared_path(engine_id: str, folder: Path = DEFAULT_FOLDER) -> Path:
    """Return the path of the file of an engine's slots.

    `engine_id` is the same in all processes of an engine, and differs after each restart.
    """
    return folder / f"{FILE_PREFIX}{urllib.parse.quote(engine_id, safe='')}{FILE_SUFFIX}"


def padded(slot_bytes: int) -> int:
    """Return a slot's bytes in memory and in a record on disk."""
    return -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def remove_stale(folder: Path) -> list[Path]:
    """Remove the files of engines that are gone, and return their paths.

    Files of live engines and of other users stay.
    """
    removed = []
    for path in sorted(folder.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}")):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _remove_if_unused(file, path):
                removed.append(path)
        finally:
            os.close(file)
    if removed:
        log.info("kvrouter: removed the offload memory of engines that are gone: %s", ", ".join(map(str, removed)))
    return removed


class Region:
    """The memory of `num_slots` slots, each with `rank_bytes` for each of `num_ranks` ranks.

    `slot_bytes` includes their padding.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        num_slots: int,
        rank_bytes: int,
        num_ranks: int,
        rank: int | None,
        path: Path | None,
        file: int | None,
    ) -> None:
        self.num_slots = num_slots
        self.num_ranks = num_ranks
        self.rank = rank
        self.rank_bytes = rank_bytes
        self.slot_bytes = padded(num_ranks * rank_bytes)
        self.path = path
        # None after `close`. The mapping itself is never closed, because a tensor of torch may still use it.
        self._memory: mmap.mmap | None = memory
        self._view = memoryview(memory)
        self._file = file
        self._tensor: Any = None
        # Addresses that are registered with the CUDA driver.
        self._pinned: list[int] = []

    @classmethod
    def create_or_open(
        cls, path: Path | None, num_slots: int, slot_bytes: int, num_ranks: int = 1, rank: int | None = 0
    ) -> Region:
        """Open the region of a file, which the first process creates, or return private memory without a path.

        Args:
            path: The file, or None for memory that is private to this process.
            num_slots: The number of slots.
            slot_bytes: Bytes of one chunk of all ranks, without padding.
            num_ranks: The number of ranks.
            rank: The rank whose part `rank_tensor` returns; None in the scheduler process.

        Raises:
            ValueError: The numbers do not fit each other or the existing file.
            OSError: With ENOSPC or ENOMEM if there is too little room; the text says what to change, and for ENOSPC how
                much room there is.
        """
        if num_slots < 1 or slot_bytes < 1 or num_ranks < 1:
            raise ValueError(
                f"{num_slots} slots of {slot_bytes} bytes for {num_ranks} ranks: cpu_bytes_to_use in kv_connector_extra_config "
                "must have room for one chunk of all layers at least"
            )
        rank_bytes, rest = divmod(slot_bytes, num_ranks)
        if rest:
            raise ValueError(f"a slot of {slot_bytes} bytes does not divide into {num_ranks} ranks")
        if rank is not None and not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} does not exist: the ranks are 0 to {num_ranks - 1}")
        size = num_slots * padded(slot_bytes)
        if path is None:
            if num_ranks > 1:
                raise ValueError(f"{num_ranks} ranks share their slots: give the path of a file")
            return cls(_private_memory(size), num_slots, rank_bytes, num_ranks, rank, None, None)
        remove_stale(path.parent)
        file = _open_file(path, size)
        try:
            memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            _leave(file, path)
            raise
        return cls(memory, num_slots, rank_bytes, num_ranks, rank, path, file)

    @property
    def address(self) -> int:
        """The address of the first slot in this process. Raises ValueError after `close`."""
        return int(self._whole().data_ptr())

    def slot(self, number: int) -> memoryview:
        """Return the slot's bytes of all ranks with its padding, (slot_bytes,), without a copy.

        Raises IndexError for a number that is no slot, ValueError after `close`.
        """
        if not 0 <= number < self.num_slots:
            raise IndexError(f"slot {number} does not exist: the slots are 0 to {self.num_slots - 1}")
        return self._view[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def rank_tensor(self) -> Any:
        """Return this rank's part of every slot as an int8 torch tensor (num_slots, rank_bytes), without a copy.

        Its rows are slot_bytes apart. Raises ValueError in the scheduler process, which has no part.
        """
        if self.rank is None:
            raise ValueError("the scheduler process has no part of the slots of its own")
        size, stride = (self.num_slots, self.rank_bytes), (self.slot_bytes, 1)
        return self._whole().as_strided(size, stride, self.rank * self.rank_bytes)

    def pin(self) -> bool:
        """Register the memory with the CUDA driver, so that copies need no staging; return whether it is registered.

        The result is False, with a warning, if the driver refuses; copies then work too, but slower. Without CUDA the
        result is False and nothing is done.
        """
        import torch

        if self._pinned or not torch.cuda.is_available():
            return bool(self._pinned)
        start, size = self._whole().data_ptr(), self.num_slots * self.slot_bytes
        step = max(PIN_BYTES // self.slot_bytes, 1) * self.slot_bytes
        for offset in range(0, size, step):
            code = int(torch.cuda.cudart().cudaHostRegister(start + offset, min(step, size - offset), 0))
            if code:
                log.warning(
                    "kvrouter: the CUDA driver does not pin the %d bytes of offload memory (error %d): copies will be slower",
                    size,
                    code,
                )
                self._unpin()
                return False
            self._pinned.append(start + offset)
        return True

    def close(self) -> None:
        """Release the memory, and remove the file if no other process uses it.

        Views that are still held keep their memory alive.
        """
        self._unpin()
        self._view.release()
        self._tensor = self._memory = None
        if self._file is not None and self.path is not None:
            file, self._file = self._file, None
            _leave(file, self.path)

    def _whole(self) -> Any:
        if self._memory is None:
            raise ValueError("the region is closed")
        if self._tensor is None:
            import torch

            self._tensor = torch.frombuffer(self._memory, dtype=torch.int8)
        return self._tensor

    def _unpin(self) -> None:
        if self._pinned:
            import torch

            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned = []


def _private_memory(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as cause:
        raise OSError(errno.ENOMEM, f"no {size} bytes of memory for the offload tier: {ADVICE}") from cause


def _open_file(path: Path, size: int) -> int:
    """Return an open file of `size` bytes that this process has locked as one of its users."""
    for _ in range(OPEN_TRIES):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(file, path):
                _reserve(file, path, size)
                return file
        except BaseException:
            _leave(file, path)
            raise
        os.close(file)
    raise OSError(errno.EBUSY, f"{path} was removed {OPEN_TRIES} times while it was opened: give another folder")


def _reserve(file: int, path: Path, size: int) -> None:
    """Allocate the size and the memory of a new file; check the size of an existing one.

    All memory is allocated at once, because memory that is missing later would be a bus error, which ends the engine.
    """
    # One process at a time may enter, so that none counts memory as taken that another is about to share with it. These
    # locks are other ones than flock's.
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        status, room = os.fstat(file), os.fstatvfs(file)
        if status.st_size == size:
            return
        if status.st_size:
            raise ValueError(
                f"{path} has {status.st_size} bytes, {size} were expected: all processes of an engine need the same "
                "kv_connector_extra_config, and each engine an engine_id of its own"
            )
        free = room.f_bavail * room.f_frsize
        if size > free:
            raise _no_room(path, size, free)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as cause:
            if cause.errno not in (errno.ENOSPC, errno.EFBIG):
                raise
            raise _no_room(path, size, free) from cause
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def _no_room(path: Path, size: int, free: int) -> OSError:
    return OSError(
        errno.ENOSPC, f"the offload tier wants {size} bytes in {path.parent}, which has {free} free: {ADVICE}"
    )


def _leave(file: int, path: Path) -> None:
    """Stop using the file; the last user removes it."""
    try:
        _remove_if_unused(file, path)
        # The mapping keeps the open file, and with it a lock, as long as a view of the memory exists.
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _remove_if_unused(file: int, path: Path) -> bool:
    """Remove the path if it is this file's and no other process holds a lock on it; return whether it was removed."""
    try:
        # A process that opens the file now waits for this lock, and then sees that the path belongs to another file or
        # to none.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    if not _is_at(file, path):
        return False
    path.unlink()
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        at_path = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(file)
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)
