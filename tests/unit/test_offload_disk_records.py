# SPDX-License-Identifier: Apache-2.0
"""Payloads of records: their places, reading and writing without copies, and reports of wrong ones."""

from __future__ import annotations

import errno
import zlib
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.records import PAGE_BYTES, Records, stride_bytes
from tests.support.disk_child import RECORD_BYTES, FaultyFiles, payload

SIZE = RECORD_BYTES
A, B = payload(b"a", SIZE), payload(b"b", SIZE)


def opened(tmp_path: Path, files: FileOps | None = None, size: int = SIZE) -> Records:
    files = files or FileOps()
    return Records(files, files.open(tmp_path / "records"), size, zlib.crc32)


def read(records: Records, index: int, check: int) -> tuple[bool, bytes]:
    into = bytearray(records.record_bytes)
    return records.read(index, memoryview(into), check), bytes(into)


@pytest.mark.parametrize(("size", "stride"), [(1, 4_096), (4_096, 4_096), (4_097, 8_192), (65_536, 65_536)])
def test_records_begin_at_pages(tmp_path: Path, size: int, stride: int) -> None:
    assert stride_bytes(size) == stride and stride % PAGE_BYTES == 0
    records = opened(tmp_path, size=size)
    data = payload(b"x")[:size] if size < RECORD_BYTES else payload(b"x", size)
    check = records.write(2, memoryview(data))
    assert (tmp_path / "records").read_bytes()[2 * stride :] == data
    assert records.count() == 3
    assert read(records, 2, check) == (True, data)
    records.close()


def test_the_file_grows_only_with_what_is_written(tmp_path: Path) -> None:
    records = opened(tmp_path)
    assert records.count() == 0
    records.write(0, memoryview(A))
    assert (tmp_path / "records").stat().st_size == SIZE
    records.write(1, memoryview(B))
    assert records.count() == 2
    records.truncate(1)
    assert (tmp_path / "records").stat().st_size == stride_bytes(SIZE)
    records.truncate(5)
    assert records.count() == 1
    records.close()


def test_a_record_cut_short_is_not_counted(tmp_path: Path) -> None:
    records = opened(tmp_path)
    records.write(1, memoryview(A))
    path = tmp_path / "records"
    path.write_bytes(path.read_bytes()[:-1])
    assert records.count() == 1
    with pytest.raises(OSError, match="the file ends"):
        read(records, 1, 0)
    records.close()


def test_buffers_are_handed_to_the_system_as_they_are(tmp_path: Path) -> None:
    class Spy(FileOps):
        def __init__(self) -> None:
            self.buffers: list[object] = []

        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            self.buffers.append(into.obj)
            return super().pread(fd, into, offset)

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            self.buffers.append(data.obj)
            return super().pwrite(fd, data, offset)

    spy = Spy()
    records = opened(tmp_path, spy)
    source, target = bytearray(A), bytearray(SIZE)
    check = records.write(0, memoryview(source))
    assert records.read(0, memoryview(target), check)
    assert spy.buffers[0] is source and spy.buffers[1] is target and len(spy.buffers) == 2
    records.close()


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    records = opened(tmp_path)
    check = records.write(0, memoryview(A))
    path = tmp_path / "records"
    for bit in range(0, 8 * SIZE, 397):
        wrong = bytearray(A)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        assert not read(records, 0, check)[0]
    records.close()


def test_short_reads_and_writes_are_finished(tmp_path: Path) -> None:
    files = FaultyFiles()
    records = opened(tmp_path, files)
    files.fail("write", "records", "short", "short", "short")
    check = records.write(0, memoryview(A))
    files.fail("read", "records", "short", "short")
    assert read(records, 0, check) == (True, A)
    assert not files.next[("write", "records")] and not files.next[("read", "records")]
    records.close()


def test_failed_reads_and_writes_are_raised(tmp_path: Path) -> None:
    files = FaultyFiles()
    records = opened(tmp_path, files)
    files.fail("write", "records", "short", errno.ENOSPC, "none")
    with pytest.raises(OSError, match="ENOSPC"):
        records.write(0, memoryview(A))
    with pytest.raises(OSError, match="nothing was written"):
        records.write(0, memoryview(A))
    files.fail("read", "records", errno.EIO)
    with pytest.raises(OSError, match="EIO"):
        read(records, 0, 0)
    records.close()


def test_a_page_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    records = opened(tmp_path)
    records.write(0, memoryview(A))
    records.read_page(0)
    with pytest.raises(OSError, match="the file ends"):
        records.read_page(1)
    records.close()
