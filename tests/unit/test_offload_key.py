# SPDX-License-Identifier: Apache-2.0
"""Names of offloaded chunks: the bytes of vLLM's own keys, in both directions."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvrouter.engine_patch.offload.key import (
    MAX_GROUP_IDX,
    OffloadKey,
    group_of,
    order,
    pack,
    short_hash,
    unpack,
)

XXHASH_BYTES, SHA256_BYTES, JOINED_BYTES = 16, 32, 64
WIDTHS = (XXHASH_BYTES, SHA256_BYTES, JOINED_BYTES)
GROUPS = (0, 1, 255, 256, 65_536, 2**31, MAX_GROUP_IDX)


def block_hash(width: int, number: int = 0) -> bytes:
    return hashlib.shake_128(number.to_bytes(4, "big")).digest(width)


def test_the_bytes_of_a_key_are_those_of_vllm() -> None:
    # vLLM 0.32 printed these bytes: v1/kv_offload/base.py make_offload_key(hash, group_idx).
    hash_32 = bytes(range(32))
    assert pack(hash_32, 5).hex() == "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f" + "00000005"
    assert pack(bytes(range(16)), 0x01020304).hex() == "000102030405060708090a0b0c0d0e0f" + "01020304"
    assert MAX_GROUP_IDX == 4_294_967_295


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_key_is_packed_and_unpacked(width: int, group: int) -> None:
    key = pack(block_hash(width), group)
    assert type(key) is bytes
    assert len(key) == width + 4
    assert unpack(key) == (block_hash(width), group)
    assert group_of(key) == group


@pytest.mark.parametrize("width", WIDTHS)
def test_the_short_hash_is_that_of_events(width: int) -> None:
    # vLLM takes the last 8 bytes of the hash, big-endian (maybe_convert_block_hash).
    long_hash = bytes(width - 8) + b"\x80\x00\x00\x00\x00\x00\x00\x01"
    assert short_hash(pack(long_hash, MAX_GROUP_IDX)) == 2**63 + 1


def test_an_8_byte_hash_is_its_own_short_hash() -> None:
    key = pack(b"\x00\x00\x00\x00\x00\x00\x01\x02", 7)
    assert short_hash(key) == 0x102
    assert unpack(key) == (b"\x00\x00\x00\x00\x00\x00\x01\x02", 7)


def test_keys_differ_by_group_and_hash() -> None:
    hashes = [block_hash(width, number) for width in WIDTHS for number in range(3)]
    assert len({pack(digest, group) for digest in hashes for group in GROUPS}) == len(hashes) * len(GROUPS)


def test_keys_are_ordered_by_group_then_hash() -> None:
    # Groups are ordered as numbers: 255 comes before 256, and not where its bytes alone would put it.
    expected = [pack(block, group) for group in GROUPS for block in sorted(block_hash(32, n) for n in range(4))]
    mixed = list(expected)
    random.Random(7).shuffle(mixed)
    assert sorted(mixed, key=order) == expected
    # Plain bytes are sorted by hash, which is another order.
    assert sorted(mixed) != expected


@pytest.mark.parametrize("width", [0, 7, 65])
def test_a_hash_that_no_engine_has_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"8 to 64 bytes, not {width}"):
        pack(bytes(width), 0)


@pytest.mark.parametrize("group", [-1, MAX_GROUP_IDX + 1])
def test_a_group_that_does_not_fit_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 4294967295, not {group}"):
        pack(bytes(32), group)


@pytest.mark.parametrize("length", [0, 4, 11, 69])
def test_bytes_that_are_no_key_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"12 to 68 bytes, not {length}"):
        unpack(OffloadKey(bytes(length)))
