# SPDX-License-Identifier: Apache-2.0
"""The CPU memory of the offload tier: slots of equal size, mapped by every rank of a node and by the scheduler process.

Slot-major: slot i is | rank 0 | rank 1 | ... |, padded to whole pages of memory, so that one slot is one record on disk
and starts where a device may write to. The memory is a file under /dev/shm, or private to the process where nobody else
needs it.

A file is in use as long as somebody holds a lock on it, and the kernel drops a lock with its holder, however that ends.
So the last one to close a region removes the file, and what a killed engine left behind is removed by the next one that
starts. Who writes which slot when is not decided here: two users of one slot are a fault of those who gave it to them.
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

# Whole pages of memory, which are also whole sectors: disk I/O that bypasses the page cache wants both ends there.
SLOT_ALIGNMENT = 4_096

DEFAULT_FOLDER = Path("/dev/shm")
FILE_PREFIX = "kvrouter-offload-"
FILE_SUFFIX = ".slots"

# A file that somebody removes between its opening and its locking is opened again; each time it is another process that
# starts or ends.
OPEN_TRIES = 100

# vLLM registers host memory in pieces of this size too (0.32 v1/kv_offload/cpu/gpu_worker.py): drivers refuse more at a
# time.
PIN_BYTES = 64 * 2**30

ADVICE = (
    "lower cpu_bytes_to_use in kv_connector_extra_config, or give the machine more of it (a container's /dev/shm: "
    "docker run --shm-size)"
)


def shared_path(engine_id: str, folder: Path = DEFAULT_FOLDER) -> Path:
    """The file of an engine's slots. engine_id: the same in all of its processes, and another in each of its lives."""
    return folder / f"{FILE_PREFIX}{urllib.parse.quote(engine_id, safe='')}{FILE_SUFFIX}"


def padded(slot_bytes: int) -> int:
    """A slot's bytes in memory and in a record on disk."""
    return -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def remove_stale(folder: Path) -> list[Path]:
    """Removes the files of engines that are gone, and returns which. Files of live engines and of other users stay."""
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
    """num_slots slots of num_ranks * rank_bytes each; slot_bytes counts their padding."""

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
        # None once it is closed. Never closed itself: a tensor of torch may still use it.
        self._memory: mmap.mmap | None = memory
        self._view = memoryview(memory)
        self._file = file
        self._tensor: Any = None
        # What is registered with the CUDA driver: addresses.
        self._pinned: list[int] = []

    @classmethod
    def create_or_open(
        cls, path: Path | None, num_slots: int, slot_bytes: int, num_ranks: int = 1, rank: int | None = 0
    ) -> Region:
        """The region of a file, made by whoever comes first; or private memory without a path.

        slot_bytes: of one chunk of all ranks, without padding. rank: which part `rank_tensor` gives; None in the
        scheduler process. Raises ValueError for numbers that do not fit one another or the file that is there, OSError
        with ENOSPC or ENOMEM when there is too little room: it says how much there is, and what to change.
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
            raise ValueError(f"rank {rank} of {num_ranks}")
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

    def slot(self, number: int) -> memoryview:
        """(slot_bytes,) the slot's bytes of all ranks with its padding, no copy. Raises IndexError for what is no slot,
        ValueError once the region is closed."""
        if not 0 <= number < self.num_slots:
            raise IndexError(f"slot {number} of {self.num_slots}")
        return self._view[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def rank_tensor(self) -> Any:
        """int8 torch tensor (num_slots, rank_bytes), rows slot_bytes apart: this rank's part of every slot, no copy."""
        if self.rank is None:
            raise ValueError("the scheduler process has no part of the slots of its own")
        size, stride = (self.num_slots, self.rank_bytes), (self.slot_bytes, 1)
        return self._whole().as_strided(size, stride, self.rank * self.rank_bytes)

    def pin(self) -> bool:
        """Registers the memory with the CUDA driver, so that copies need no staging; whether it is. False, with a
        warning where the driver refuses: copies work then too, slower. Without CUDA nothing is done."""
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
        """Gives the memory back, and removes the file if nobody else uses it. Views that are still held keep their
        memory alive."""
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
    """An open file of size bytes that this process has locked as a user of it."""
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
    """Gives a new file its size and its memory; checks the size of one that is there.

    All of it at once: memory that is missing later would be a bus error, which ends the engine.
    """
    # One process at a time, so that nobody counts as taken what another is about to share with it. Other locks than
    # flock's.
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
    """Stops using the file; the last user removes it."""
    try:
        _remove_if_unused(file, path)
        # The mapping keeps the open file, and with it a lock, as long as somebody has a view of it.
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _remove_if_unused(file: int, path: Path) -> bool:
    """Removes the path if it is this file's and nobody else holds a lock on it."""
    try:
        # A process that opens the file now waits for this lock, then sees that the path is another file's or none's.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    if not _is_at(file, path):
        return False
    path.unlink()
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
