# SPDX-License-Identifier: Apache-2.0
"""The slots' memory as files: shared by processes, and gone with the last of them, however it ends. Without torch."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.memory.region import Region, padded, remove_stale, shared_path

SLOTS, RANKS, RANK_BYTES = 5, 2, 3_000
SLOT_BYTES = RANKS * RANK_BYTES

# Seconds, longer than a process takes to start here.
PATIENCE_S = 30.0

# The program of a `User`: it opens a region, reports that, and carries out each line of its standard input until that
# ends.
USER = """
import sys
from pathlib import Path
from kvrouter.engine_patch.offload.memory.region import Region
path, slots, slot_bytes, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:5])
region = Region.create_or_open(path, slots, slot_bytes, ranks, None)
print("open", flush=True)
for line in sys.stdin:
    verb, slot, start, text = line.split()
    place = region.slot(int(slot))[int(start):int(start) + len(text)]
    if verb == "write":
        place[:] = text.encode()
    print(bytes(place).decode(), flush=True)
region.close()
print("closed", flush=True)
"""


class User:
    """Another process that has the region open."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", USER, str(path), str(SLOTS), str(SLOT_BYTES), str(RANKS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def opened(self) -> User:
        assert self.answer() == "open"
        return self

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        """Let the process close the region and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.answer() == "closed"
        self.process.wait()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return shared_path("engine/1 dp0", tmp_path)


@pytest.fixture
def users(path: Path) -> Iterator[list[User]]:
    """Start two other processes with the region open."""
    both = [User(path), User(path)]
    yield [user.opened() for user in both]
    for user in both:
        user.kill()
        for stream in (user.process.stdin, user.process.stdout):
            assert stream is not None
            stream.close()


def open_region(path: Path | None, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> Region:
    return Region.create_or_open(path, slots, slot_bytes, RANKS if path else 1, None)


def test_slots_are_whole_pages_side_by_side_and_start_as_zeros(path: Path) -> None:
    region = open_region(path)
    assert region.slot_bytes == padded(SLOT_BYTES) == 8_192
    assert region.rank_bytes == RANK_BYTES
    assert path.stat().st_size == SLOTS * 8_192
    for number in range(SLOTS):
        assert bytes(region.slot(number)) == bytes(8_192)
        region.slot(number)[:] = bytes([number + 1]) * 8_192
    assert path.read_bytes() == b"".join(bytes([number + 1]) * 8_192 for number in range(SLOTS))
    region.close()


@pytest.mark.parametrize(("slot_bytes", "in_memory"), [(1, 4_096), (4_095, 4_096), (4_096, 4_096), (4_097, 8_192)])
def test_a_slot_is_padded_to_whole_pages(slot_bytes: int, in_memory: int) -> None:
    region = open_region(None, 3, slot_bytes)
    assert [len(region.slot(number)) for number in range(3)] == [in_memory] * 3
    region.close()


@pytest.mark.parametrize("number", [-1, SLOTS])
def test_a_slot_that_is_not_there_is_refused(number: int) -> None:
    region = open_region(None)
    with pytest.raises(IndexError, match=f"slot {number} does not exist"):
        region.slot(number)
    region.close()


def test_private_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    region = open_region(None)
    region.slot(2)[:3] = b"abc"
    assert bytes(region.slot(2)[:4]) == b"abc\0"
    assert region.path is None
    assert list(tmp_path.iterdir()) == []
    region.close()


def test_two_processes_see_each_others_bytes(path: Path, users: list[User]) -> None:
    first, second = users
    assert first.ask("write 4 2995 hello") == "hello"
    assert second.ask("read 4 2995 .....") == "hello"
    region = open_region(path)
    assert bytes(region.slot(4)[2_995:3_000]) == b"hello"
    region.slot(4)[2_995:3_000] = b"HELLO"
    assert first.ask("read 4 2995 .....") == "HELLO"
    region.close()


def test_the_last_user_to_close_removes_the_file(path: Path, users: list[User]) -> None:
    open_region(path).close()
    assert path.exists()
    users[0].end()
    assert path.exists()
    users[1].end()
    assert not path.exists()


def test_a_view_that_is_still_held_keeps_its_bytes_and_not_the_file(path: Path) -> None:
    region = open_region(path)
    view = region.slot(1)
    view[:4] = b"kept"
    region.close()
    assert bytes(view[:4]) == b"kept"
    assert not path.exists()
    with pytest.raises(ValueError, match="released"):
        region.slot(1)


def test_closing_a_region_whose_file_was_replaced_leaves_the_new_file(path: Path) -> None:
    old = open_region(path)
    path.unlink()
    new = open_region(path)
    old.close()
    assert path.exists()
    new.close()
    assert not path.exists()


def test_a_view_held_after_closing_does_not_keep_the_file_from_its_last_user(path: Path, users: list[User]) -> None:
    region = open_region(path)
    view = region.slot(0)
    region.close()
    for user in users:
        user.end()
    assert not path.exists()
    assert len(view) == 8_192


def test_a_file_that_goes_between_opening_and_locking_is_made_again(path: Path) -> None:
    with path.open("wb") as file:
        # Lock the file as a process does that removes a stale file.
        fcntl.flock(file, fcntl.LOCK_EX)
        user = User(path)
        until_somebody_waits_for(file.fileno())
        path.unlink()
    user.opened()
    assert path.stat().st_size == SLOTS * 8_192
    user.end()
    assert not path.exists()
    for stream in (user.process.stdin, user.process.stdout):
        assert stream is not None
        stream.close()


def until_somebody_waits_for(file: int) -> None:
    """Wait until another process waits for the lock of the file.

    A lock that is waited for begins with an arrow, and names its file as device:inode. Source: proc_locks(5).
    """
    name = f":{os.fstat(file).st_ino} "
    end = time.monotonic() + PATIENCE_S
    while not any("->" in line and name in line for line in Path("/proc/locks").read_text().splitlines()):
        assert time.monotonic() < end, "nobody waits"
        time.sleep(0.001)


def test_closing_twice_is_closing_once(path: Path) -> None:
    region = open_region(path)
    region.close()
    other = open_region(path)
    region.close()
    assert path.exists()
    other.close()


def test_after_kill_9_the_file_stays_until_the_next_start_removes_it(path: Path, users: list[User]) -> None:
    users[0].ask("write 0 0 stale")
    users[0].kill()
    # The other user is alive, so the file is in use.
    assert remove_stale(path.parent) == []
    users[1].kill()
    assert path.exists()
    next_life = open_region(shared_path("engine 2", path.parent))
    assert not path.exists()
    next_life.close()


def test_the_next_life_with_the_same_name_gets_fresh_memory(path: Path, users: list[User]) -> None:
    users[0].ask("write 0 0 stale")
    for user in users:
        user.kill()
    region = open_region(path, slots=SLOTS + 1)
    assert bytes(region.slot(0)) == bytes(region.slot_bytes)
    region.close()


def test_removing_stale_files_touches_nothing_else(path: Path) -> None:
    live = open_region(path)
    dead, foreign = shared_path("dead", path.parent), path.parent / "vllm_offload_1.mmap"
    dead.write_bytes(b"old")
    foreign.write_bytes(b"not ours")
    link = shared_path("link", path.parent)
    link.symlink_to(foreign)
    assert remove_stale(path.parent) == [dead]
    assert sorted(path.parent.iterdir()) == sorted([path, foreign, link])
    live.close()


def test_a_link_in_the_place_of_the_file_is_not_followed(path: Path) -> None:
    target = path.parent / "target"
    path.symlink_to(target)
    with pytest.raises(OSError, match=r"link|symbolic") as failure:
        open_region(path)
    assert failure.value.errno == errno.ELOOP
    assert not target.exists()


def test_users_that_disagree_about_the_size_get_an_error_with_both_numbers(path: Path, users: list[User]) -> None:
    with pytest.raises(
        ValueError, match=rf"has {SLOTS * 8_192} bytes, {(SLOTS + 1) * 8_192} were expected: .*engine_id"
    ):
        open_region(path, slots=SLOTS + 1)
    assert users[0].ask("write 0 0 fine") == "fine"


def test_too_little_room_is_an_error_with_both_numbers_before_anything_is_taken(path: Path) -> None:
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    slots = 2 * free // 8_192
    with pytest.raises(OSError, match=rf"wants {slots * 8_192} bytes in {re.escape(str(path.parent))}") as failure:
        open_region(path, slots=slots)
    assert failure.value.errno == errno.ENOSPC
    assert re.search(r"which has \d+ free: lower cpu_bytes_to_use .*--shm-size", str(failure.value))
    assert list(path.parent.iterdir()) == []


def test_a_file_has_all_of_its_memory_from_the_start(path: Path) -> None:
    region = open_region(path, slots=64)
    assert path.stat().st_blocks * 512 >= 64 * 8_192
    region.close()


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "ranks", "rank", "text"),
    [
        (0, 8, 1, 0, "0 slots of 8 bytes .*cpu_bytes_to_use"),
        (1, 0, 1, 0, "1 slots of 0 bytes"),
        (1, 9, 2, 0, "9 bytes does not divide into 2 ranks"),
        (1, 8, 2, 2, "rank 2 does not exist"),
        (1, 8, 2, -1, "rank -1 does not exist"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    path: Path, slots: int, slot_bytes: int, ranks: int, rank: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Region.create_or_open(path, slots, slot_bytes, ranks, rank)
    assert not path.exists()


def test_ranks_cannot_share_private_memory() -> None:
    with pytest.raises(ValueError, match="2 ranks share their slots: give the path of a file"):
        Region.create_or_open(None, 1, 8, 2, 0)


def test_engines_of_any_name_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["a/b", "a b", "a_b", "a%2Fb", "..", "é"]
    paths = {shared_path(name, tmp_path) for name in names}
    assert len(paths) == len(names)
    assert {path.parent for path in paths} == {tmp_path}
