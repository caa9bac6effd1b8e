# SPDX-License-Identifier: Apache-2.0
"""Request bodies in gzip and zstd: decoded to the same bytes, and stopped at the limit, at a cut and at other bytes."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.content_coding import (
    MAX_MEMBERS,
    OUTPUT_BYTES,
    BodyDecoder,
    ContentCoding,
    coding_of,
)
from kvrouter.router.base.common.errors import BadQuestion, TooLarge, WrongCoding
from tests.support.compression import CODINGS, COMPRESS, bomb, wide_zstd

LIMIT_BYTES = 4 * 1024**2
BODY = b'{"model": "m", "prompt": "' + b"hello " * 40 + b'"}'
# A frame that every decoder of zstd passes over (RFC 8878, 3.1.2).
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"


def decode(coding: str, encoded: bytes, limit_bytes: int = LIMIT_BYTES) -> bytes:
    return BodyDecoder(ContentCoding(coding), encoded, limit_bytes).whole()


def refusal(coding: str, encoded: bytes) -> str:
    with pytest.raises(BadQuestion) as caught:
        decode(coding, encoded)
    assert caught.value.code == "malformed_encoding"
    return caught.value.message


@pytest.mark.parametrize("coding", CODINGS)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 3 * OUTPUT_BYTES),
    kinds=st.integers(1, 256),
    budget=st.integers(1, 10**6),
)
def test_a_body_is_decoded_whatever_its_size_and_in_whatever_parts(
    coding: str, seed: int, size: int, kinds: int, budget: int
) -> None:
    body = bytes(byte % kinds for byte in Random(seed).randbytes(size))
    decoder = BodyDecoder(ContentCoding(coding), COMPRESS[coding](body), LIMIT_BYTES)
    while not decoder.run(budget):
        pass
    assert decoder.whole() == body


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_in_several_members_is_their_bodies_in_order(coding: str) -> None:
    compress = COMPRESS[coding]
    assert decode(coding, compress(BODY) + compress(b"") + compress(b"more")) == BODY + b"more"
    assert decode(coding, compress(b"x") * MAX_MEMBERS) == b"x" * MAX_MEMBERS
    assert f"over {MAX_MEMBERS} members" in refusal(coding, compress(b"") * (MAX_MEMBERS + 1))


def test_a_skippable_frame_adds_nothing() -> None:
    assert decode("zstd", SKIPPABLE + COMPRESS["zstd"](BODY) + SKIPPABLE) == BODY


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_that_is_cut_at_any_place_ends_too_early(coding: str) -> None:
    encoded = COMPRESS[coding](BODY)
    for end in range(len(encoded)):
        assert "ends too early" in refusal(coding, encoded[:end]), end


@pytest.mark.parametrize("coding", CODINGS)
def test_other_bytes_after_the_end_are_refused(coding: str) -> None:
    encoded = COMPRESS[coding](BODY)
    for more in (b"\0" * 8, b"garbage, not a member", BODY, COMPRESS["gzip" if coding == "zstd" else "zstd"](BODY)):
        assert "bytes after its end" in refusal(coding, encoded + more)
    # This may be the beginning of another member.
    assert "ends too early" in refusal(coding, encoded + encoded[:3])


def test_a_body_in_another_coding_and_one_with_a_wrong_byte_are_refused() -> None:
    assert "cannot be decoded" in refusal("gzip", BODY)
    assert "cannot be decoded" in refusal("zstd", BODY)
    encoded = bytearray(COMPRESS["gzip"](BODY))
    encoded[-8] ^= 1
    assert "incorrect data check" in refusal("gzip", bytes(encoded))


@pytest.mark.parametrize("coding", CODINGS)
def test_exactly_the_limit_is_decoded_and_one_byte_more_is_not(coding: str) -> None:
    assert len(decode(coding, COMPRESS[coding](bytes(LIMIT_BYTES)))) == LIMIT_BYTES
    with pytest.raises(TooLarge, match=f"over the limit of {LIMIT_BYTES} bytes"):
        decode(coding, COMPRESS[coding](bytes(LIMIT_BYTES + 1)))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_is_decoded_no_further_than_to_the_limit(coding: str) -> None:
    encoded = bomb(coding, 100 * LIMIT_BYTES)
    assert len(encoded) < LIMIT_BYTES / 8
    decoder = BodyDecoder(ContentCoding(coding), encoded, LIMIT_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decoder.whole()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    decoded_bytes = decoder._size_bytes
    assert LIMIT_BYTES < decoded_bytes <= LIMIT_BYTES + OUTPUT_BYTES
    # The decoder holds what it has decoded, the next piece, and the window of the library.
    assert peak_bytes < LIMIT_BYTES + 4 * OUTPUT_BYTES


def test_a_window_that_needs_much_memory_is_refused_and_one_of_8_mib_is_not() -> None:
    assert "window over 8 MiB" in refusal("zstd", wide_zstd(BODY))
    noise = Random(1).randbytes(9 * 1024**2)
    assert decode("zstd", COMPRESS["zstd"](noise), limit_bytes=len(noise)) == noise


@pytest.mark.parametrize(
    ("encoding", "coding"),
    [
        (b"gzip", "gzip"),
        (b"GZip", "gzip"),
        (b"x-gzip", "gzip"),
        (b"\tzstd ", "zstd"),
        (b"identity", "identity"),
        (b"", "identity"),
    ],
)
def test_the_codings_are_known_by_their_names_in_any_case(encoding: bytes, coding: str) -> None:
    assert coding_of(encoding) == coding


@pytest.mark.parametrize(
    "encoding", [b"br", b"deflate", b"gzip, gzip", b"gzip, identity", b"gzip;q=1", b"\xff", b"x" * 9_000]
)
def test_another_coding_and_a_second_one_are_refused_by_name(encoding: bytes) -> None:
    with pytest.raises(WrongCoding) as caught:
        coding_of(encoding)
    assert encoding[:5].decode("latin-1") in caught.value.message
    assert "gzip, zstd, identity" in caught.value.message and len(caught.value.message) < 300
