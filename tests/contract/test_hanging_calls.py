# SPDX-License-Identifier: Apache-2.0
"""Reads that hang in the kernel: an empty pipe stands for the file of a mount whose server is gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import pytest

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.hanging_call import CallHangs, HangingCall
from kvrouter.router.base.common.regular_file import read_regular
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.reloaded import Reloaded, ReloadMetrics
from kvrouter.router.model.config.settings import Config
from kvrouter.router.serve.access.certificate import CertificateFiles, read_certificate
from tests.support.certificates import Authority

# Any time will do, because a read hangs until the pipe is fed.
HANG_S = 0.01


class Pipe(NamedTuple):
    """A stand-in for a mount: `read` hangs until `write`."""

    read_fd: int
    write_fd: int

    def read(self) -> bytes:
        return os.read(self.read_fd, 1)

    def write(self, content: bytes) -> None:
        os.write(self.write_fd, content)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    ends = Pipe(*os.pipe())
    yield ends
    # Closing the pipe ends a thread that still reads.
    os.close(ends.write_fd)


async def until_ended(call: HangingCall[bytes]) -> bytes:
    while True:
        try:
            return await call.result(HANG_S)
        except CallHangs:
            continue


async def test_a_call_that_hangs_runs_once_and_is_taken_when_it_ends(pipe: Pipe) -> None:
    call = HangingCall("read", pipe.read)
    threads = threading.active_count()
    for _ in range(3):
        with pytest.raises(CallHangs):
            await call.result(HANG_S)
    assert threading.active_count() == threads + 1
    pipe.write(b"a")
    assert await until_ended(call) == b"a"
    # The next call runs the function again.
    pipe.write(b"b")
    assert await until_ended(call) == b"b"


def test_an_error_of_the_call_is_raised_once() -> None:
    errors = [OSError("first"), OSError("second")]

    def fail() -> None:
        raise errors.pop(0)

    call = HangingCall("fail", fail)
    with pytest.raises(OSError, match="first"):
        asyncio.run(call.result())
    with pytest.raises(OSError, match="second"):
        call.wait()


def test_neither_loop_nor_process_waits_for_it_at_the_end() -> None:
    program = """
import asyncio, os
from kvrouter.router.base.common.hanging_call import CallHangs, HangingCall

async def main():
    try:
        await HangingCall("read", lambda: os.read(os.pipe()[0], 1)).result(0.01)
    except CallHangs:
        print("hangs")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "hangs\n"


async def test_a_file_of_keys_that_hangs_is_a_problem_until_it_is_read(tmp_path: Path, pipe: Pipe) -> None:
    file = tmp_path / "keys"
    file.write_text("x")
    pipe.write(b"1")
    metrics = ReloadMetrics(MetricRegistry())
    reloaded = Reloaded("api_keys", [file], pipe.read, metrics, hang_s=HANG_S)
    file.write_text("xy")
    while not reloaded.problem:
        assert not await reloaded.look()
    assert reloaded.problem == (f"cannot read {file}: no answer in {HANG_S:g} s; restore its mount, or put it back")
    assert reloaded.value == b"1"
    pipe.write(b"2")
    while not await reloaded.look():
        pass
    assert (reloaded.value, reloaded.problem) == (b"2", "")


async def test_many_that_want_a_change_at_once_share_one_look(tmp_path: Path, pipe: Pipe) -> None:
    file = tmp_path / "keys"
    file.write_text("x")
    pipe.write(b"1")
    hang_s = 60.0
    reloaded = Reloaded("api_keys", [file], pipe.read, None, hang_s=hang_s)
    reads: list[str] = []
    call = reloaded._changed._call
    reloaded._changed._call = lambda: reads.append("") or call()  # type: ignore[func-returns-value]
    file.write_text("xy")
    looks = [asyncio.create_task(reloaded.look(at_once=True)) for _ in range(5)]
    await asyncio.sleep(0)
    # The first client hangs up, and the others still get the look under way.
    looks[0].cancel()
    pipe.write(b"2")
    assert await asyncio.gather(*looks[1:]) == [True, False, False, False]
    assert reloaded.value == b"2" and len(reads) == 1


async def test_nobody_who_wants_a_change_at_once_waits_for_a_file_that_hung(tmp_path: Path, pipe: Pipe) -> None:
    file = tmp_path / "keys"
    file.write_text("x")
    pipe.write(b"1")
    reloaded = Reloaded("api_keys", [file], pipe.read, None, hang_s=HANG_S)
    waits: list[float] = []
    result = reloaded._changed.result

    async def counted(timeout_s: float) -> list[bytes]:
        waits.append(timeout_s)
        return await result(timeout_s)

    reloaded._changed.result = counted  # type: ignore[method-assign, assignment]
    file.write_text("xy")
    while not reloaded.problem:
        await asyncio.gather(*(reloaded.look(at_once=True) for _ in range(5)))
    assert len(waits) == 1, "one wait for all"
    assert not await reloaded.look(at_once=True) and len(waits) == 1
    pipe.write(b"2")
    while not await reloaded.look():
        pass
    assert (reloaded.value, reloaded.problem) == (b"2", "")


def test_a_start_does_not_wait_for_a_file_that_hangs(tmp_path: Path, pipe: Pipe) -> None:
    file = tmp_path / "keys"
    file.write_text("x")
    with pytest.raises(SettingError, match="no answer in"):
        Reloaded("api_keys", [file], pipe.read, ReloadMetrics(MetricRegistry()), hang_s=HANG_S)


class Mount(PosixPath):
    """A path whose `stat` hangs while `feed` is a pipe."""

    feed: Pipe | None = None

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        if (feed := Mount.feed) is not None:
            feed.read()
        return super().stat(follow_symlinks=follow_symlinks)


# The looks after which a state that is awaited does not come.
LOOKS = 1_000


@pytest.fixture
def mount(tmp_path: Path, pipe: Pipe) -> Iterator[Mount]:
    yield Mount(tmp_path / "mounted")
    Mount.feed = None


async def test_a_file_of_keys_whose_mount_comes_back_unchanged_is_no_problem(mount: Mount, pipe: Pipe) -> None:
    mount.write_text("good")
    registry = MetricRegistry()

    def read() -> str:
        text = mount.read_text()
        if text != "good":
            raise SettingError("the text is wrong")
        return text

    reloaded = Reloaded("api_keys", [mount], read, ReloadMetrics(registry), hang_s=HANG_S)

    def stale() -> float | None:
        return registry.get_sample_value("kvrouter_access_file_stale", {"file": "api_keys"})

    async def until(holds: Callable[[], bool]) -> None:
        for _ in range(LOOKS):
            assert not await reloaded.look()
            if holds():
                return
        raise AssertionError(reloaded.problem)

    async def hang_and_come_back() -> None:
        Mount.feed = pipe
        await until(lambda: "no answer" in reloaded.problem)
        assert stale() == 1
        Mount.feed = None
        pipe.write(b"1")
        await until(lambda: "no answer" not in reloaded.problem)

    await hang_and_come_back()
    assert (reloaded.problem, stale()) == ("", 0)
    mount.write_text("wrong")
    await until(lambda: reloaded.problem == "the text is wrong")
    await hang_and_come_back()
    assert (reloaded.problem, stale()) == ("the text is wrong", 1)


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    fifo, folder, large = tmp_path / "fifo", tmp_path / "folder", tmp_path / "large"
    os.mkfifo(fifo)
    folder.mkdir()
    large.write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to(large)
    for path in (fifo, folder, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path, 5)
    assert read_regular(link, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        read_regular(large, 4)


@pytest.mark.parametrize("place", ["certificate", "key", "client_ca"])
def test_a_fifo_in_place_of_a_pem_file_does_not_block(tmp_path: Path, place: str) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.issue("router")
    files: dict[str, Any] = {"certificate": pair.certificate, "key": pair.key, "client_ca": authority.file}
    read_certificate(CertificateFiles(**files))
    files[place] = tmp_path / "fifo"
    os.mkfifo(files[place])
    with pytest.raises(OSError, match="not a regular file"):
        read_certificate(CertificateFiles(**files))


async def test_without_files_there_is_nothing_to_watch_and_no_end() -> None:
    """Watch without files: the task must not end, because a task that ends counts as a failure of the router."""
    watching = asyncio.create_task(LiveSettings(Config()).files.watch())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
