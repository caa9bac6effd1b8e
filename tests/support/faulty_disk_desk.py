# SPDX-License-Identifier: Apache-2.0
"""A disk tier on files that fail on command, whose queued work runs when the test says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE, Finished
from kvrouter.engine_patch.offload.key import OffloadKey
from tests.support.disk_child import (
    RECORD_BYTES,
    key,
    payload,
)
from tests.support.disk_desk import Desk as PlainDesk

A, B, C, D, E = (key(number) for number in range(5))
RETRY_S = 10.0


class Desk(PlainDesk):
    """A disk tier on files that fail on command, whose executor and clock (`now`) the test moves."""

    def __init__(self, folder: Path, records: int) -> None:
        self.now = 0.0
        super().__init__(folder, records, retry_s=RETRY_S, clock=lambda: self.now)

    def write(self, name: OffloadKey, slot: int = 0) -> bool | None:  # type: ignore[override]
        """Write a key, and return whether that succeeded; None if the tier did not begin the write."""
        return self._ended(WRITE, name) if super().write(name, slot) else None

    def read(self, name: OffloadKey) -> bool | None:
        """Read a key, and return whether that succeeded; None if the tier did not begin the read.

        A successful read must return the right bytes.
        """
        self.slots.fill(0, bytes(RECORD_BYTES))
        if not self.tier.read(name, 0):
            return None
        ok = self._ended(READ, name)
        assert not ok or self.slots.bytes(0) == payload(name)
        return ok

    def _ended(self, kind: str, name: OffloadKey) -> bool:
        self.hands.run_all()
        (finished,) = self.tier.poll()
        assert finished == Finished(kind, name, 0, finished.ok)
        return finished.ok

    def trial(self) -> None:
        """Poll once, which may begin a trial of the failed disk, and once more to see the trial's end."""
        assert self.tier.poll() == []
        self.hands.run_all()
        assert self.tier.poll() == []


@contextmanager
def desks_in(folder: Path) -> Iterator[Callable[..., Desk]]:
    """Yield a function that makes desks on one folder with some keys written; close their tiers at the end."""
    made: list[Desk] = []

    def make(records: int = 3, *names: OffloadKey) -> Desk:
        desk = Desk(folder, records)
        made.append(desk)
        for name in names:
            assert desk.write(name)
        desk.changes()
        return desk

    yield make
    for desk in made:
        desk.tier.close()


def patch(path: Path, offset: int) -> None:
    """Flip one bit of the byte at `offset`."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def files_of(tmp_path: Path) -> tuple[Path, Path]:
    (manifest,), (records,) = tmp_path.glob("*/manifest"), tmp_path.glob("*/records")
    return manifest, records


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
