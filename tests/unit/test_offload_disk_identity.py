# SPDX-License-Identifier: Apache-2.0
"""Identities that make records foreign to each other, and the claim of a folder."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format import checksum as checksums
from kvrouter.engine_patch.offload.disk.format.checksum import CRC32, XXH3, checksum, default_checksum
from kvrouter.engine_patch.offload.disk.format.folder import DiskFolderError, FolderInUse, ForeignFolder, claim
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity, GroupIdentity
from tests.support.disk_child import identity

LOG = logging.getLogger("t")
GROUP = GroupIdentity("full_attention", (512, 256), 16)
WHOLE = DiskIdentity("m", "bfloat16", (GROUP,), 4, "sha256", 4_096, 2, "tp=2", "00ff", (("revision", "1"),), CRC32)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"dtype": "fp8"},
        {"groups": (GROUP, GROUP)},
        {"groups": (dataclasses.replace(GROUP, spec="sliding_window 128"),)},
        {"groups": (dataclasses.replace(GROUP, page_bytes=(256, 512)),)},
        {"groups": (dataclasses.replace(GROUP, tokens_per_block=32),)},
        {"blocks_per_chunk": 1},
        {"hash_algorithm": "xxhash"},
        {"record_bytes": 8_192},
        {"num_ranks": 1},
        {"parallel": "tp=1 pp=2"},
        {"hash_root": "00fe"},
        {"extra": (("revision", "2"),)},
        {"extra": ()},
        {"checksum": XXH3},
    ],
    ids=str,
)
def test_every_field_of_the_identity_changes_the_folder(changed: dict[str, object]) -> None:
    variant = dataclasses.replace(WHOLE, **changed)  # type: ignore[arg-type]
    assert variant.digest() != WHOLE.digest()
    assert variant.folder_name() != WHOLE.folder_name()
    assert {field.name for field in dataclasses.fields(WHOLE)} >= changed.keys()


def test_no_text_can_stand_for_two_fields() -> None:
    first = dataclasses.replace(WHOLE, model='m","dtype":"x', dtype="y")
    second = dataclasses.replace(WHOLE, model="m", dtype='x","dtype":"y')
    assert first.canonical() != second.canonical()


def test_the_canonical_bytes_do_not_change() -> None:
    assert WHOLE.canonical() == (
        b'{"blocks_per_chunk":4,"checksum":"crc32","dtype":"bfloat16","extra":[["revision","1"]],"format_version":1,'
        b'"groups":[{"page_bytes":[512,256],"spec":"full_attention","tokens_per_block":16}],"hash_algorithm":"sha256",'
        b'"hash_root":"00ff","model":"m","num_ranks":2,"parallel":"tp=2","record_bytes":4096}'
    )
    assert WHOLE.folder_name() == WHOLE.digest().hex()[:32]


def test_the_readable_form_has_the_digest() -> None:
    fields = json.loads(WHOLE.readable())
    assert fields.pop("digest") == WHOLE.digest().hex()
    assert fields == json.loads(WHOLE.canonical())


def test_checksums_are_the_standard_ones() -> None:
    data = memoryview(b"123456789")
    assert checksum(CRC32)(data) == 0xCBF43926
    # The xxhsum program prints this checksum for an empty file.
    assert checksum(XXH3)(memoryview(b"")) == 0x2D06800538D394C2
    with pytest.raises(ValueError, match="'md5' is not available"):
        checksum("md5")


def test_crc32_is_used_without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "xxh3_64", None)
    assert default_checksum() == CRC32
    with pytest.raises(ValueError, match="install xxhash"):
        checksum(XXH3)


def test_a_claimed_folder_is_described_and_private(tmp_path: Path) -> None:
    folder = claim(tmp_path / "new" / "root", identity(), "disk_path", LOG)
    assert folder.path == tmp_path / "new" / "root" / identity().folder_name()
    assert (folder.path / "identity.json").read_text() == identity().readable()
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.release()
    folder.release()
    claim(tmp_path / "new" / "root", identity(), "disk_path", LOG).release()


def test_a_second_engine_gets_an_error_that_names_the_first_and_the_fix(tmp_path: Path) -> None:
    folder = claim(tmp_path, identity(), "disk_path", LOG)
    with pytest.raises(FolderInUse) as error:
        claim(tmp_path, identity(), "disk_path", LOG)
    text = str(error.value)
    assert str(folder.path) in text and str(os.getpid()) in text and "set disk_path to another folder" in text
    # Another model in the same place does not conflict.
    claim(tmp_path, identity(model="n"), "disk_path", LOG).release()
    folder.release()
    claim(tmp_path, identity(), "disk_path", LOG).release()


def test_the_named_owner_is_the_last_one(tmp_path: Path) -> None:
    folder = claim(tmp_path, identity(), "disk_path", LOG)
    folder.release()
    (folder.path / "lock").write_text("1234567890 on an earlier host\n" * 3)
    folder = claim(tmp_path, identity(), "disk_path", LOG)
    assert (folder.path / "lock").read_text() == f"{os.getpid()} on {os.uname().nodename}\n"
    folder.release()


def test_a_lock_without_a_written_owner_is_respected(tmp_path: Path) -> None:
    claim(tmp_path, identity(), "disk_path", LOG).release()
    fd = os.open(tmp_path / identity().folder_name() / "lock", os.O_RDWR | os.O_TRUNC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(FolderInUse, match="unknown"):
        claim(tmp_path, identity(), "disk_path", LOG)
    os.close(fd)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / identity().folder_name()
    path.mkdir()
    (path / "identity.json").write_text(identity(model="n").readable())
    with pytest.raises(ForeignFolder, match="left as they are"):
        claim(tmp_path, identity(), "disk_path", LOG)
    assert (path / "identity.json").read_text() == identity(model="n").readable()
    # The refused folder is not kept locked.
    (path / "identity.json").unlink()
    claim(tmp_path, identity(), "disk_path", LOG).release()


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFolderError, match=r"cannot use this folder .*set disk_path"):
        claim(tmp_path / "file", identity(), "disk_path", LOG)
    (tmp_path / identity().folder_name()).mkdir()
    (tmp_path / identity().folder_name() / "lock").mkdir()
    with pytest.raises(DiskFolderError, match="cannot use this folder"):
        claim(tmp_path, identity(), "disk_path", LOG)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


OWN = identity().readable().encode()


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\xff\xfe\x00", OWN[:100], bytes(len(OWN)), flipped(OWN, OWN.index(b"dtype") + 10), b"[]",
     b'{"digest": 3}', b"[" * 9999],
    ids=["empty", "no text", "half", "zeros", "one bit", "a list", "no digest", "deep"],
)  # fmt: skip
def test_a_damaged_description_is_set_aside_and_the_folder_starts_empty(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = claim(tmp_path, identity(), "disk_path", LOG)
    (folder.path / "manifest").write_bytes(b"of nobody knows what")
    (folder.path / "records").write_bytes(b"bytes")
    folder.release()
    (folder.path / "identity.json").write_bytes(damaged)
    claim(tmp_path, identity(), "disk_path", LOG).release()
    assert (folder.path / "identity.json").read_bytes() == OWN
    assert (folder.path / "identity.json.damaged").read_bytes() == damaged
    assert not (folder.path / "manifest").exists()
    (record,) = caplog.records
    text = record.getMessage()
    assert str(folder.path / "identity.json") in text and ".damaged" in text and "starts empty" in text
    # The next start finds nothing to report.
    claim(tmp_path, identity(), "disk_path", LOG).release()
    assert len(caplog.records) == 1


def test_one_flipped_bit_of_another_identity_is_damage_too(tmp_path: Path) -> None:
    """Take it for damage and not for a foreign folder, which would refuse the start: nobody wrote such an identity."""
    folder = claim(tmp_path, identity(), "disk_path", LOG)
    folder.release()
    (folder.path / "identity.json").write_bytes(flipped(OWN, OWN.index(b'"digest": "') + 12))
    claim(tmp_path, identity(), "disk_path", LOG).release()
    assert (folder.path / "identity.json").read_bytes() == OWN


def test_the_description_is_on_the_medium_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync = os.fsync

    def seen(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        named = "named" if (tmp_path / identity().folder_name() / "identity.json").exists() else "unnamed"
        calls.append(f"{path.name} {named}")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    claim(tmp_path, identity(), "disk_path", LOG).release()
    assert calls == ["identity.json.new unnamed", f"{identity().folder_name()} named"]
