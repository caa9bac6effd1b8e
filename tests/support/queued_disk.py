# SPDX-License-Identifier: Apache-2.0
"""A disk tier within the process, whose jobs wait in a queue until a test ends them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from kvrouter.engine_patch.offload.key import OffloadKey

Record = TypeVar("Record")


class DiskJob(NamedTuple):
    """A read or write of a disk."""

    kind: str
    key: OffloadKey
    slot: int
    ok: bool = True


class QueuedDisk(Generic[Record]):
    """A disk that holds records of some kind. How its jobs end is up to the subclass."""

    writable = True

    def __init__(self) -> None:
        self.records: dict[OffloadKey, Record] = {}
        self.jobs: list[DiskJob] = []
        self._changes: list[tuple[bool, OffloadKey]] = []

    @property
    def pending(self) -> int:
        return len(self.jobs)

    def open(self) -> list[OffloadKey]:
        return list(self.records)

    def holds(self, key: OffloadKey) -> bool:
        return key in self.records

    def writing(self, key: OffloadKey) -> bool:
        return any(job.kind == "write" and job.key == key for job in self.jobs)

    def touch(self, keys: Iterable[OffloadKey]) -> None: ...

    def write(self, key: OffloadKey, slot: int) -> bool:
        return self._queue(DiskJob("write", key, slot))

    def read(self, key: OffloadKey, slot: int) -> bool:
        return self._queue(DiskJob("read", key, slot))

    def _queue(self, job: DiskJob) -> bool:
        self.jobs.append(job)
        return True

    def take_changes(self) -> list[tuple[bool, OffloadKey]]:
        changes, self._changes = self._changes, []
        return changes

    def clear(self) -> None:
        self._changes += [(False, key) for key in self.records]
        self.records.clear()

    def close(self) -> None: ...
