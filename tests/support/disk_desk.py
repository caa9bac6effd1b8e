# SPDX-License-Identifier: Apache-2.0
"""A disk tier on a healthy disk, whose queued work runs when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE, Finished
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey
from tests.support.disk_child import (
    RECORD_BYTES,
    STRIDE_BYTES,
    FaultyFiles,
    HandExecutor,
    Slots,
    identity,
    key,
    payload,
)

A, B, C, D = (key(number) for number in range(4))
SLOTS = 8


class Desk:
    """A disk tier with its slots, and with an executor (`hands`) that the test runs step by step."""

    def __init__(self, folder: Path, records: int = 3, **options: Any) -> None:
        self.slots = Slots(SLOTS)
        self.hands = HandExecutor(options.pop("max_queued", 100))
        self.files = FaultyFiles()
        self.told: dict[OffloadKey, bool] = {}
        tier_options = {"executor": lambda: self.hands, "files": self.files, "identity": identity(), **options}
        self.tier = DiskTier(
            folder,
            record_bytes=RECORD_BYTES,
            budget_bytes=records * STRIDE_BYTES,
            slot_bytes_of=self.slots.view,
            **tier_options,
        )
        self.found = self.tier.open()

    def write(self, name: OffloadKey, slot: int = 0) -> bool:
        self.slots.fill(slot, payload(name))
        return self.tier.write(name, slot)

    def store(self, *names: OffloadKey) -> None:
        """Write these keys one after the other, and take the tier's reports of them."""
        for name in names:
            assert self.write(name)
            self.hands.run_all()
            assert self.tier.poll() == [Finished(WRITE, name, 0, True)]
        self.tier.take_changes()

    def reads_back(self, name: OffloadKey) -> bool:
        self.slots.fill(7, bytes(RECORD_BYTES))
        assert self.tier.read(name, 7)
        self.hands.run_all()
        assert self.tier.poll() == [Finished(READ, name, 7, True)]
        return self.slots.bytes(7) == payload(name)

    def changes(self) -> list[tuple[str, OffloadKey]]:
        return [("+" if stored else "-", name) for stored, name in self.tier.take_changes()]


@contextmanager
def desks_in(folder: Path) -> Iterator[Callable[..., Desk]]:
    """Yield a function that makes desks on one folder; close their tiers at the end."""
    made: list[Desk] = []

    def make(records: int = 3, **options: Any) -> Desk:
        made.append(Desk(folder, records, **options))
        return made[-1]

    yield make
    for desk in made:
        desk.tier.close()
