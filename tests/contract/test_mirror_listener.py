# SPDX-License-Identifier: Apache-2.0
"""The listener of `kvrouter shadow` for copies of requests: what it hands on, and what it only counts."""

from __future__ import annotations

import asyncio

import pytest

from kvrouter.shadow.mirror_listener import MAX_BODY_BYTES, HeldBytes, MirrorListener
from kvrouter.shadow.observation import Skip
from tests.support.compression import CODINGS, COMPRESS, bomb
from tests.support.exchange import exchange

BODY = b'{"model": "m", "prompt": "hello"}' * 9


def mirrored(body: bytes, coding: str, held: HeldBytes) -> list[bytes | Skip]:
    """Return the body that is handed on, or why it is not."""
    seen: list[bytes | Skip] = []

    async def run() -> None:
        listener = MirrorListener(
            lambda taken, worker, request_id: seen.append(taken),
            lambda reason, detail: seen.append(reason),
            held,
            worker_header=None,
            id_header="x-request-id",
        )
        port = await listener.start("127.0.0.1", 0)
        try:
            headers = {"content-encoding": coding} if coding else {}
            answer = await asyncio.to_thread(exchange, port, "POST", "/v1/completions", body, headers)
            assert answer.status == 204
        finally:
            await listener.stop()

    asyncio.run(run())
    return seen


@pytest.mark.parametrize("coding", ["", *COMPRESS])
def test_a_body_is_handed_on_plain_and_its_plain_size_is_held(coding: str) -> None:
    held = HeldBytes()
    assert mirrored(COMPRESS.get(coding, bytes)(BODY), coding, held) == [BODY]
    assert held.size == len(BODY)


@pytest.mark.parametrize(
    ("coding", "body", "reason"),
    [
        ("br", BODY, Skip.BROKEN),
        ("gzip, zstd", BODY, Skip.BROKEN),
        *((coding, COMPRESS[coding](BODY)[:-1], Skip.BROKEN) for coding in CODINGS),
        *((coding, BODY, Skip.BROKEN) for coding in CODINGS),
        *((coding, bomb(coding, 2 * MAX_BODY_BYTES), Skip.TOO_LARGE) for coding in CODINGS),
    ],
    ids=lambda value: "body" if isinstance(value, bytes) else str(value),
)
def test_what_cannot_be_decoded_is_counted_and_holds_nothing(coding: str, body: bytes, reason: Skip) -> None:
    held = HeldBytes()
    assert mirrored(body, coding, held) == [reason]
    assert held.size == 0


def test_a_body_that_is_plain_over_what_may_be_held_is_left_out() -> None:
    held = HeldBytes(limit=len(BODY) - 1)
    assert mirrored(COMPRESS["zstd"](BODY), "zstd", held) == [Skip.OVERFLOW]
    assert held.size == 0
