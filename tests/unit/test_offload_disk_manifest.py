# SPDX-License-Identifier: Apache-2.0
"""Entries of the manifest that are believed, and entries that are not."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format import manifest as module
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.manifest import (
    ENTRY_BYTES,
    HEADER_BYTES,
    Entry,
    ForeignManifest,
    Manifest,
    Scan,
    decode_entry,
    encode_entry,
)
from kvrouter.engine_patch.offload.key import OffloadKey, pack

DIGEST = bytes(range(32))
SHORT = pack(bytes(range(8)), 3)
LONG = pack(bytes(range(100, 164)), 2**32 - 1)


def opened(path: Path, digest: bytes = DIGEST, record_bytes: int = 4_096) -> Manifest:
    files = FileOps()
    return Manifest(files, files.open(path), digest, record_bytes)


def scanned(path: Path) -> tuple[Scan, int]:
    manifest = opened(path)
    try:
        return manifest.scan(), manifest.generation
    finally:
        manifest.close()


def filled(path: Path, *entries: Entry) -> None:
    manifest = opened(path)
    manifest.scan()
    for entry in entries:
        manifest.put(entry)
    manifest.close()


def entry(record: int, seq: int = 0, generation: int = 1, name: OffloadKey = SHORT) -> Entry:
    return Entry(name, record, generation, seq, 7)


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def place(record: int) -> int:
    return HEADER_BYTES + ENTRY_BYTES * record


def test_the_bytes_of_an_entry_do_not_change() -> None:
    body = (
        b"KVRE" + bytes([12]) + bytes(3) + struct.pack("<QQQQ", 5, 6, 7, 2**64 - 1) + SHORT.ljust(72, b"\0") + bytes(12)
    )
    assert encode_entry(Entry(SHORT, 5, 6, 7, 2**64 - 1)) == body + struct.pack("<I", zlib.crc32(body))
    assert len(body) + 4 == ENTRY_BYTES


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_an_entry_is_read_back(name: OffloadKey) -> None:
    full_entry = Entry(name, 2**40, 2**63, 2**64 - 1, 2**64 - 1)
    assert decode_entry(encode_entry(full_entry), 2**40) == full_entry


def test_no_flipped_bit_is_believed() -> None:
    data = encode_entry(entry(9, seq=4))
    for bit in range(8 * ENTRY_BYTES):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        assert decode_entry(bytes(wrong), 9) is None, bit


def test_no_torn_entry_is_believed() -> None:
    old, new = encode_entry(entry(9, seq=4)), encode_entry(Entry(LONG, 9, 1, 5, 8))
    for cut in range(1, ENTRY_BYTES):
        torn = new[:cut] + old[cut:]
        assert torn in (old, new) or decode_entry(torn, 9) is None, cut


def test_an_entry_in_a_wrong_place_is_not_believed() -> None:
    assert decode_entry(encode_entry(entry(9)), 8) is None


@pytest.mark.parametrize(
    "change", [lambda b: b"KVRX" + b[4:], lambda b: b[:4] + b"\x0b" + b[5:], lambda b: b[:4] + b"\x49" + b[5:]]
)
def test_impossible_fields_are_refused_despite_a_good_checksum(change: object) -> None:
    body = change(encode_entry(entry(9))[:-4])  # type: ignore[operator]
    assert decode_entry(body + struct.pack("<I", zlib.crc32(body)), 9) is None


def test_a_new_file_is_empty_and_stays_small(tmp_path: Path) -> None:
    assert scanned(tmp_path / "m") == (Scan([], [], 0), 1)
    assert scanned(tmp_path / "m") == (Scan([], [], 0), 1)
    assert (tmp_path / "m").stat().st_size == HEADER_BYTES


def test_a_scan_finds_entries_and_no_voided_ones(tmp_path: Path) -> None:
    path = tmp_path / "m"
    filled(path, entry(0, 5), entry(3, 9, name=LONG), entry(1, 2))
    manifest = opened(path)
    assert manifest.scan() == Scan([entry(0, 5), entry(1, 2), entry(3, 9, name=LONG)], [], 10)
    manifest.void(0)
    assert (manifest.get(0), manifest.get(2), manifest.get(3)) == (None, None, entry(3, 9, name=LONG))
    manifest.close()
    assert scanned(path)[0] == Scan([entry(1, 2), entry(3, 9, name=LONG)], [], 10)


def test_a_scan_in_several_reads_finds_all_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    entries = [entry(number, number) for number in range(11)]
    filled(path, *entries)
    monkeypatch.setattr(module, "SCAN_BYTES", 4 * ENTRY_BYTES)
    assert scanned(path)[0] == Scan(entries, [], 11)


def test_damaged_entries_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    filled(path, *(entry(number, number) for number in range(4)))
    patch(path, place(1) + 50, b"?")
    # The last entry is cut short, as a file system that ran full may leave it.
    path.write_bytes(path.read_bytes()[:-20])
    assert scanned(path)[0] == Scan([entry(0, 0), entry(2, 2)], [1, 3], 3)
    # A void that is cut short is still a void.
    path.write_bytes(path.read_bytes()[: place(3)] + bytes(50))
    assert scanned(path)[0] == Scan([entry(0, 0), entry(2, 2)], [1], 3)


def test_another_generation_voids_all(tmp_path: Path) -> None:
    path = tmp_path / "m"
    filled(path, entry(0, 5))
    manifest = opened(path)
    manifest.scan()
    manifest.set_generation(2)
    manifest.put(entry(1, 6, generation=2))
    # This entry belongs to the generation before: its write was under way.
    manifest.put(entry(2, 7, generation=1))
    manifest.close()
    assert scanned(path) == (Scan([entry(1, 6, generation=2)], [], 8), 2)


@pytest.mark.parametrize("offset", [0, 9, 24, 40, 64])
def test_a_damaged_header_voids_all(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "m"
    filled(path, entry(0, 5, generation=4), entry(1, 6, generation=1))
    patch(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
    assert scanned(path) == (Scan([], [0, 1], 7), 5)
    assert scanned(path) == (Scan([], [], 7), 5)


def test_a_header_cut_short_voids_all(tmp_path: Path) -> None:
    path = tmp_path / "m"
    filled(path)
    path.write_bytes(path.read_bytes()[:100])
    assert scanned(path) == (Scan([], [], 0), 1)


def test_another_identity_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "m"
    filled(path, entry(0))
    before = path.read_bytes()
    for manifest in (opened(path, bytes(32)), opened(path, record_bytes=8_192)):
        with pytest.raises(ForeignManifest):
            manifest.scan()
        manifest.close()
    assert path.read_bytes() == before


def test_truncated_entries_are_not_found(tmp_path: Path) -> None:
    path = tmp_path / "m"
    filled(path, entry(0, 5), entry(1, 6), entry(2, 7))
    manifest = opened(path)
    manifest.scan()
    manifest.truncate(1)
    manifest.truncate(9)
    manifest.close()
    assert scanned(path)[0] == Scan([entry(0, 5)], [], 6)
