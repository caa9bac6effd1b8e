# SPDX-License-Identifier: Apache-2.0
"""The fast path takes a request only if the general parser understands it as the same request.

Otherwise two readers of one head would disagree, which makes request smuggling possible.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from kvrouter.router.serve.api.http.deadlines import HttpLimits
from kvrouter.router.serve.api.http.plain_head import PlainHead, plain_head
from kvrouter.router.serve.api.http.request import HttpRequest
from kvrouter.router.serve.api.http.request_parser import RequestParser
from tests.support.examples import examples

LIMITS = HttpLimits()
BELOW = (b"/reservations/", b"/v1/reservations/")
PATHS = {b"/query": "/query", b"/query_by_hash": "/query_by_hash"}
# Paths whose requests may have any header, and are forwarded with it.
FORWARDED = {b"/v1/completions": "/v1/completions"}
BODY = b'{"model": "m", "block_hashes": [1, 2, 3]}'
PLAIN = b"POST /query HTTP/1.1\r\nHost: router:30000\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY

# The parts of heads: good parts often, so that many heads are accepted, and everything that confuses parsers.
METHODS = [b"POST"] * 30 + [b"DELETE"] * 10 + [b"GET", b"post", b"POST ", b" POST", b"PUT", b"POS"]
TARGETS = (
    [b"/query"] * 15
    + [b"/v1/completions"] * 15
    + [b"/v1/completions?x", b"/query_by_hash", b"/query?x=1", b"/quer%79", b"//query", b"http://h/query", b"*", b""]
)
TARGETS += [b"/reservations/s-1", b"/reservations/s.1/prefill_complete", b"/v1/reservations/s-1"] * 4
TARGETS += [b"/reservations/a%2fb", b"/reservations/a?b", b"/reservations/", b"/reservations//", b"/reservations/a#b"]
VERSIONS = [b"HTTP/1.1"] * 30 + [b"HTTP/1.0", b"http/1.1", b"HTTP/1.1 ", b"HTTP/2.0", b"HTTP/1.12", b""]
ENDS = [b"\r\n"] * 60 + [b"\n", b"\r", b"\r\r\n", b"\r\n ", b"\r\n\t", b"", b"\0\r\n", b"\x80\r\n", b"\r\n\r\n"]
COLONS = [b": "] * 30 + [b":", b":  ", b" : ", b":\t", b"", b"::"]
NAMES = [
    *(b"Host", b"host", b"HOST", b"Content-Length", b"content-length", b"Content-Type", b"Accept", b"User-Agent"),
    *(b"Accept-Encoding", b"Accept-Language", b"Connection", b"Transfer-Encoding", b"Expect", b"Upgrade", b"TE"),
    *(
        b"Authorization",
        b"X-Request-Id",
        b"X-Session-Id",
        b"Proxy-Connection",
        b"Keep-Alive",
        b"Trailer",
        b"X-Forwarded-For",
        b"traceparent",
        b"Via",
        b"Content-Length ",
        b" Host",
        b"Content_Length",
        b"",
        b"Content-Length\0",
    ),
]
VALUES = [
    *(b"router:30000", b"127.0.0.1", b"[::1]:80", b"a,b", b"h:", b"h:08", b"-", b"", b" ", b"x y", b"\xff"),
    *(b"0", b"3", b"+3", b"-3", b"03", b"3, 3", b"3 ", b"0x3", b"99999999999999999999", b"3\t", b"1e1"),
    *(b"application/json", b"application/msgpack", b"*/*", b"gzip", b"chunked", b"identity", b"100-continue"),
    *(b"keep-alive", b"Keep-Alive", b"close", b"keep-alive, close", b"upgrade", b"h2c", b"curl/8"),
]


class Sink:
    """The events that the general parser makes of the same bytes."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.whole = 0

    def on_request(self, request: HttpRequest) -> None:
        self.requests.append(request)

    def on_body(self, piece: bytes) -> None:
        self.requests[-1].body += piece

    def on_whole(self) -> None:
        self.whole += 1


def understood(request: Any) -> tuple[object, ...]:
    """Return all fields of a request that its handler depends on."""
    names = ("method", "path", "url", "content_type", "accept", "authorization", "body", "keep_alive", "speaks_1_1")
    return tuple(getattr(request, name) for name in (*names, "expects_continue", "refusal"))


def held_together(data: bytes) -> bool:
    """Return whether the fast path takes `data`. Fails if the general parser would understand anything else."""
    head = plain_head(data, PATHS, FORWARDED, BELOW, None, LIMITS.max_head_bytes, LIMITS.max_headers)
    if head is None:
        return False
    sink = Sink()
    parser = RequestParser(sink, LIMITS.max_head_bytes, LIMITS.max_headers)
    parser.feed(data)
    assert (len(sink.requests), sink.whole, parser.in_message) == (1, 1, False), data
    short = HttpRequest.plain(head)
    short.body += data[head.body_start :]
    assert understood(sink.requests[0]) == understood(short), data
    if head.headers is not None:
        assert short.headers == sink.requests[0].headers, data
    return True


def some_request(draw: random.Random) -> bytes:
    fields = [(b"Host", b"router:30000"), (b"Content-Length", b"%d" % len(BODY))]
    # The request is mostly what a client sends, with something strange now and then.
    for name, value in ((b"Content-Type", b"application/json"), (b"Accept", b"*/*"), (b"User-Agent", b"curl/8")):
        if draw.random() < 0.5:
            fields.append((name, value))
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 3))):
        fields.insert(draw.randrange(len(fields) + 1), (draw.choice(NAMES), draw.choice(VALUES)))
    if draw.random() < 0.1:
        del fields[draw.randrange(len(fields))]
    strange = draw.random() < 0.5
    ends = ENDS if strange else ENDS[:1]
    head = b" ".join((draw.choice(METHODS), draw.choice(TARGETS), draw.choice(VERSIONS))) + draw.choice(ends)
    for name, value in fields:
        head += name + (draw.choice(COLONS) if strange else b": ") + value + draw.choice(ends)
    data = head + draw.choice(ends) + BODY
    for _ in range(draw.choice((0, 0, 0, 0, 1, 2))):
        at = draw.randrange(len(data) + 1)
        data = draw.choice(
            (data[:at], data[:at] + bytes((draw.randrange(256),)) + data[at + draw.randrange(2) :], data * 2)
        )
    return data


@pytest.mark.property
def test_what_the_short_way_takes_the_general_parser_understands_alike() -> None:
    draw = random.Random(20261)
    count = examples(100_000)
    taken = sum(held_together(some_request(draw)) for _ in range(count))
    # Both ways were taken.
    assert count / 20 < taken < count * 19 / 20, taken


@pytest.mark.parametrize(
    "part, instead",
    [
        (b"POST", b"GET"),
        (b"/query ", b"/query?x "),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
        (b"Host: router:30000\r\n", b""),
        (b"Host: router:30000\r\n", b"Host: a\r\nHost: a\r\n"),
        (b"Host: router:30000", b"Host: [::1]"),
        (b"Content-Length: 41", b"Content-Length: 041"),
        (b"Content-Length: 41", b"Content-Length: 40"),
        (b"Content-Length: 41", b"Content-Length: 42"),
        (b"Content-Length: 41", b"Content-Length: 41\r\nContent-Length: 41"),
        (b"Content-Length: 41", b"Content-Length : 41"),
        (b"Content-Length: 41", b"Transfer-Encoding: chunked\r\nContent-Length: 41"),
        (b"Content-Length: 41", b"Content-Length: 41\r\n folded"),
        (b"Content-Length: 41", b"Content-Length: 41\r\nConnection: close"),
        (b"Content-Length: 41", b"Content-Length: 41\r\nExpect: 100-continue"),
        (b"Content-Length: 41", b"Content-Length: 41\r\nX-Other: 1"),
        (b"Content-Length: 41", b"Content-Length: 41\r\nAccept: \xff"),
    ],
)
def test_whatever_is_not_plain_goes_the_general_way(part: bytes, instead: bytes) -> None:
    assert held_together(PLAIN)
    assert part in PLAIN and not held_together(PLAIN.replace(part, instead))


@pytest.mark.parametrize("target", [b"/query", b"/v1/completions"])
@pytest.mark.parametrize(
    ("line", "is_taken"),
    [
        (b"Accept: */*", True),
        (b"x-session-id: a", True),
        (b"Content-Type: application/json", True),
        # Headers that depend on the browser's page, and repeated headers, are judged in one place, the general way.
        (b"Origin: http://router:30000", False),
        (b"Sec-Fetch-Site: same-origin", False),
        (b"Content-Type: text/plain", False),
        (b"Content-Type: multipart/form-data; boundary=application", False),
        (b"x-session-id: a\r\nX-Session-Id: b", False),
        (b"x-kvrouter-worker: a\r\nx-kvrouter-worker: b", False),
    ],
)
def test_what_a_page_may_have_sent_goes_the_general_way(target: bytes, line: bytes, is_taken: bool) -> None:
    data = PLAIN.replace(b"/query", target).replace(b"Host:", line + b"\r\nHost:")

    def taken(hosts: set[bytes] | None) -> bool:
        limits = LIMITS.max_head_bytes, LIMITS.max_headers
        return plain_head(data, PATHS, FORWARDED, BELOW, hosts, *limits) is not None

    assert taken(None) == taken({b"router:30000"}) == is_taken
    for hosts in (set(), {b"router"}, {b"Router:30000"}):
        assert not taken(hosts)


def test_a_plain_head_has_what_its_handler_needs() -> None:
    data = PLAIN.replace(b"\r\n\r\n", b"\r\naccept: application/msgpack\r\nCONTENT-TYPE: application/json\r\n\r\n")
    head = plain_head(data, PATHS, FORWARDED, BELOW, None, LIMITS.max_head_bytes, LIMITS.max_headers)
    assert isinstance(head, PlainHead)
    assert (head.path, head.content_type, head.accept) == ("/query", "application/json", "application/msgpack")
    assert data[head.body_start :] == BODY
    assert plain_head(data, PATHS, FORWARDED, BELOW, None, len(data) - len(BODY) - 10, LIMITS.max_headers) is None


if __name__ == "__main__":
    # Arguments: COUNT SEED
    draw = random.Random(int(sys.argv[2]))
    print(
        f"{sys.argv[1]} heads, {sum(held_together(some_request(draw)) for _ in range(int(sys.argv[1])))} taken, none otherwise"
    )
