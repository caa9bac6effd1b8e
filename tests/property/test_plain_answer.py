# SPDX-License-Identifier: Apache-2.0
"""An engine's answer is the same whether the fast path or the general parser reads it, wholly or in part.

It holds wherever the bytes are cut, and whatever is wrong with them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from typing import Any

import pytest

from kvrouter.router.base.common.direct_task import DirectTask
from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.model.upstream.failure import Failure
from kvrouter.router.model.upstream.plain_answer import plain_answer, whole_chunks
from tests.support.engine_link import connected
from tests.support.examples import examples

VERSIONS = [b"HTTP/1.1"] * 30 + [b"HTTP/1.0", b"HTTP/1.2", b"http/1.1", b"HTTP/2"]
STATUSES = [b"200 OK"] * 20 + [b"404 Not Found", b"500 ", b"200", b"200  OK", b"204 No", b"304 No", b"99 x", b"1000 x"]
ENDS = [b"\r\n"] * 60 + [b"\n", b"\r", b"\r\n ", b"\0\r\n", b""]
COLONS = [b": "] * 30 + [b":", b":  ", b" : ", b":\t", b""]
NAMES = [
    *(b"Content-Type", b"Date", b"X-Request-Id", b"Connection", b"Content-Length", b"Transfer-Encoding", b"Trailer"),
    *(b"Proxy-Connection", b"Upgrade", b"Keep-Alive", b"", b"X Y", b"X-More"),
]
VALUES = [b"a", b"a b", b"", b"keep-alive", b"close", b"chunked", b"gzip, chunked", b"2", b"02", b"+2", b"\xff", b"a "]

# Cancelled timers stay in the loop until it runs, and nothing here waits for the loop, so it runs once after this
# number of answers.
ANSWERS_A_TURN = 1_000


def some_chunks(draw: random.Random) -> bytes:
    """Draw a chunked body, now and then malformed."""
    data = b""
    for _ in range(draw.randrange(4)):
        part = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 20)))
        extension = draw.choice((b"",) * 20 + (b";x=1", b" ", b";"))
        data += b"%x%b\r\n%b" % (len(part), extension, part) + draw.choice(ENDS[:50] + ENDS[-4:])
    trailer = draw.choice((b"",) * 20 + (b"x: 1\r\n", b"x"))
    return data + draw.choice((b"0", b"0", b"0", b"00", b"")) + b"\r\n" + trailer + b"\r\n"


def some_answer(draw: random.Random) -> bytes:
    """Draw an answer, mostly as engines send it, now and then with something strange."""
    strange = draw.random() < 0.5
    body = bytes(draw.randrange(256) for _ in range(draw.randrange(20)))
    fields = [(b"Content-Type", b"application/json")]
    if draw.random() < 0.5:
        fields.append((b"Content-Length", b"%d" % len(body)))
    else:
        fields.append((b"Transfer-Encoding", b"chunked"))
        body = some_chunks(draw)
    if strange:
        for _ in range(draw.randrange(3)):
            again = draw.choice(fields) if draw.random() < 0.3 else (draw.choice(NAMES), draw.choice(VALUES))
            fields.insert(draw.randrange(len(fields) + 1), again)
    ends = ENDS if strange else ENDS[:1]
    head = draw.choice(VERSIONS if strange else VERSIONS[:1]) + b" " + draw.choice(STATUSES) + draw.choice(ends)
    for name, value in fields:
        head += name + (draw.choice(COLONS) if strange else b": ") + value + draw.choice(ends)
    data = head + draw.choice(ends) + body
    if draw.random() < 0.2:
        at = draw.randrange(len(data))
        data = draw.choice((data[:at], data + b"more", data[:at] + bytes((draw.randrange(256),)) + data[at + 1 :]))
    return data


def cut(draw: random.Random, data: bytes) -> list[bytes]:
    """Cut the data into one piece or several, often where a chunk may end."""
    places = {draw.randrange(1, len(data)) for _ in range(draw.choice((0, 0, 1, 2, 5)))} if len(data) > 1 else set()
    if draw.random() < 0.5:
        places |= {
            position + 2
            for position in range(len(data) - 2)
            if data[position : position + 2] == b"\r\n" and draw.random() < 0.3
        }
    edges = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


class General(Connection):
    """A connection without the fast path."""

    def _take_plain(self, data: bytes) -> bool:
        return False


def outcome(kind: type[Connection], loop: asyncio.AbstractEventLoop, pieces: list[bytes], *, closes: bool) -> list[Any]:
    """Return the outcome of an exchange in which these bytes arrive, and then perhaps the end of the connection."""
    steps: list[Any] = []

    async def exchange(connection: Connection) -> None:
        try:
            head = await connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"", 60.0)
            steps.append((head.status, head.reason, head.headers, head.length))
            body = bytearray()
            steps.append(body)
            await connection.relay(lambda parts: body.extend(b"".join(parts)))
            steps.append("whole")
        except Failure as failure:
            steps.append((failure.kind, failure.text))
        steps.append(connection.reusable())

    with connected(kind, loop) as connection:
        DirectTask(exchange(connection), loop, lambda task: None).resume()
        for piece in pieces:
            if not connection._transport.is_closing():  # type: ignore[union-attr]
                connection.data_received(piece)
        if closes:
            connection.connection_lost(None)
    return steps


def held_together(draw: random.Random, count: int) -> int:
    """Return how many answers begin on the fast path. Fails if the outcome of an answer depends on the path."""
    loop = asyncio.new_event_loop()
    taken = 0
    try:
        for at in range(count):
            data = some_answer(draw)
            pieces, closes = cut(draw, data), draw.random() < 0.5
            short = outcome(Connection, loop, pieces, closes=closes)
            assert short == outcome(General, loop, pieces, closes=closes), pieces
            taken += plain_answer(pieces[0], 65_536) is not None
            if at % ANSWERS_A_TURN == 0:
                loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    return taken


@pytest.mark.property
def test_an_answer_is_the_same_on_the_short_way_and_past_it() -> None:
    count = examples(30_000)
    taken = held_together(random.Random(20262), count)
    # Both ways were taken.
    assert count / 20 < taken < count * 19 / 20, taken


@pytest.mark.parametrize(
    "data, ends, parts",
    [
        (b"", 0, []),
        (b"3\r\nabc\r\n", 0, [b"abc"]),
        (b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n", 1, [b"abc", b"0123456789"]),
        (b"3\r\nabc\r", -1, None),
        (b"3\r\nabcd\r\n", -1, None),
        (b"3;x\r\nabc\r\n", -1, None),
        (b"0\r\n\r\nx", -1, None),
        (b"0\r\nx: 1\r\n\r\n", -1, None),
        (b"0000003\r\nabc\r\n", -1, None),
        (b"\r\n", -1, None),
    ],
)
def test_chunks_are_taken_whole_or_not_at_all(data: bytes, ends: int, parts: list[bytes] | None) -> None:
    contents: list[bytes] = []
    assert whole_chunks(data, 0, contents) == ends
    assert parts is None or contents == parts


if __name__ == "__main__":
    # Arguments: COUNT SEED
    begun = held_together(random.Random(int(sys.argv[2])), int(sys.argv[1]))
    print(f"{sys.argv[1]} answers, {begun} on the short way, none otherwise")
