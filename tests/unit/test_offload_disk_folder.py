# SPDX-License-Identifier: Apache-2.0
"""The disk tier's folder: its records after a restart, and the identity to which it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format.folder import DiskFolderError, FolderInUse, ForeignFolder
from tests.support.disk_child import STRIDE_BYTES, identity, key
from tests.support.disk_desk import A, B, C, D, Desk, desks_in


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    with desks_in(tmp_path) as make:
        yield make


def test_records_of_an_earlier_engine_are_found_oldest_first(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A, B, C, D)
    desk.tier.close()
    again = desks()
    assert again.found == [B, C, D] and again.changes() == []
    assert again.tier.records == 3 and all(again.reads_back(name) for name in (B, C, D))
    again.store(A)
    again.tier.close()
    # Ages continue from their values before the restart.
    assert desks().found == [C, D, A]


def test_a_cleared_folder_stays_cleared(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A, B, C)
    desk.tier.clear()
    desk.tier.close()
    assert desk.files.syncs == 1
    again = desks()
    assert again.found == []
    again.store(D)
    again.tier.close()
    assert desks().found == [D]


def test_a_smaller_budget_keeps_the_newest_and_gives_space_back(desks: Callable[..., Desk], tmp_path: Path) -> None:
    names = [key(number) for number in range(6)]
    desk = desks(records=6)
    desk.store(*names)
    desk.tier.close()
    # The newest records lie at the end of the file and must move.
    again = desks(records=2)
    assert again.found == names[4:] and again.tier.counters.evicted == 4
    assert all(again.reads_back(name) for name in names[4:])
    (file,) = tmp_path.glob("*/records")
    assert file.stat().st_size <= 2 * STRIDE_BYTES
    again.tier.close()
    larger = desks(records=6)
    assert larger.tier.counters.corrupt == 0
    assert larger.found == names[4:] and all(larger.reads_back(name) for name in names[4:])
    larger.store(A)
    assert larger.tier.records == 3


def test_a_move_that_was_cut_short_is_done_again(desks: Callable[..., Desk], tmp_path: Path) -> None:
    names = [key(number) for number in range(4)]
    desk = desks(records=4)
    desk.store(*names)
    desk.tier.close()
    (manifest,) = tmp_path.glob("*/manifest")
    (records,) = tmp_path.glob("*/records")
    before = manifest.read_bytes(), records.read_bytes()
    desks(records=2).tier.close()
    # The files look as if the process had been killed before they were cut: the records are moved, and also still at
    # their old places.
    moved = manifest.read_bytes(), records.read_bytes()
    manifest.write_bytes(moved[0] + before[0][len(moved[0]) :])
    records.write_bytes(moved[1] + before[1][len(moved[1]) :])
    third = desks(records=2)
    assert third.found == names[2:] and third.tier.counters.corrupt == 0
    assert all(third.reads_back(name) for name in names[2:])


def test_other_identities_are_neither_found_nor_touched(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks()
    desk.store(A)
    desk.tier.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other_desk = desks(identity=identity(model="other"))
    assert other_desk.found == []
    other_desk.store(B)
    other_desk.tier.clear()
    assert {path: path.read_bytes() for path in before} == before


def test_a_renamed_folder_is_refused(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks()
    desk.store(A)
    desk.tier.close()
    other_identity = identity(model="other")
    (tmp_path / identity().folder_name()).rename(tmp_path / other_identity.folder_name())
    with pytest.raises(ForeignFolder, match=other_identity.folder_name()):
        desks(identity=other_identity)
    # The folder is refused even if somebody has corrected its description by hand.
    (tmp_path / other_identity.folder_name() / "identity.json").write_text(other_identity.readable())
    with pytest.raises(ForeignFolder, match="identity"):
        desks(identity=other_identity)


def test_a_folder_is_used_by_one_engine_at_a_time(desks: Callable[..., Desk]) -> None:
    desk = desks()
    with pytest.raises(FolderInUse, match="set my_option to another folder"):
        desks(option="my_option")
    desk.tier.close()
    desks()


def test_files_that_cannot_be_opened_are_an_error_that_says_what_to_do(
    desks: Callable[..., Desk], tmp_path: Path
) -> None:
    (tmp_path / identity().folder_name() / "records").mkdir(parents=True)
    with pytest.raises(DiskFolderError, match="set disk_path"):
        desks()
    (tmp_path / identity().folder_name() / "records").rmdir()
    desks()
