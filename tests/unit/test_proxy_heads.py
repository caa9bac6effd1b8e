# SPDX-License-Identifier: Apache-2.0
"""Heads, targets and addresses that the proxy uses for an engine, without sockets."""

from __future__ import annotations

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.upstream.origin import Target, target_of
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.route.tokens.client_body import read_client_body
from kvrouter.router.serve.proxy.headers import answer_headers, named_in_header, request_head
from kvrouter.router.serve.proxy.openai_body import openai_body
from kvrouter.router.serve.proxy.worker_addresses import Addresses


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:8000", Target("h", 8000, False, b"h:8000", b"")),
        ("http://h", Target("h", 80, False, b"h", b"")),
        ("https://h/", Target("h", 443, True, b"h", b"")),
        ("http://[::1]:8000/a/b/", Target("::1", 8000, False, b"[::1]:8000", b"/a/b")),
        ("http://10.0.0.1:1/x", Target("10.0.0.1", 1, False, b"10.0.0.1:1", b"/x")),
    ],
)
def test_a_url_is_split_into_its_parts(url: str, target: Target) -> None:
    assert target_of(url) == target


def head(headers: list[tuple[bytes, bytes]], **others: object) -> bytes:
    arguments: dict[str, object] = {
        "length": 2,
        "request_id": b"r",
        "authorization": None,
        "rank": None,
        **others,
    }
    return request_head(target_of("http://h:1/p"), b"/v1/x?y=1", headers, **arguments)  # type: ignore[arg-type]


def test_a_head_has_each_header_once() -> None:
    headers = [(b"host", b"a"), (b"content-length", b"99"), (b"x-request-id", b"other"), (b"a", b"1"), (b"a", b"2")]
    assert head(headers) == (
        b"POST /p/v1/x?y=1 HTTP/1.1\r\nhost: h:1\r\na: 1\r\na: 2\r\nx-request-id: r\r\ncontent-length: 2\r\n\r\n"
    )


def test_several_connection_headers_name_what_stays() -> None:
    headers = [(b"connection", b"X-A , x-b"), (b"connection", b"x-c"), (b"x-a", b"1"), (b"x-b", b"1"), (b"x-c", b"1")]
    assert b"x-" not in head(headers).replace(b"x-request-id", b"")


def test_the_workers_key_replaces_the_clients() -> None:
    headers = [(b"authorization", b"Bearer client")]
    assert b"authorization" not in head(headers)
    changed = head(headers, authorization=b"Bearer engine")
    assert changed.count(b"authorization") == 1 and b"authorization: Bearer engine\r\n" in changed


def test_an_engine_cannot_speak_for_the_router() -> None:
    headers = [(b"x-kvrouter-worker", b"forged"), (b"x-request-id", b"e"), (b"content-length", b"3"), (b"b", b"1")]
    headers += [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*")]
    assert answer_headers(headers, [(b"x-kvrouter-worker", b"w0")], b"r") == [
        (b"x-request-id", b"e"),
        (b"b", b"1"),
        (b"x-kvrouter-worker", b"w0"),
    ]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("w0", "w0"),
        ("w0@3", "w0@3"),
        ("a b,c", "a%20b%2Cc"),
        ("ä\r\n", "%C3%A4%0D%0A"),
        ("50%", "50%25"),
        ("a/b:1", "a/b:1"),
    ],
)
def test_the_name_of_a_worker_is_encoded_for_a_header(name: str, named: str) -> None:
    assert named_in_header(name) == named


def test_the_addresses_of_a_fleet_are_listed() -> None:
    def registered(name: str, url: str | None, rank: int = 0, model: str = "m") -> Registration:
        return Registration(WorkerKey(model, name, rank), url=url)

    addresses = Addresses(
        [
            registered("dp", "http://10.0.0.1:1", 0),
            registered("dp", "http://10.0.0.1:1", 1),
            registered("alone", "http://10.0.0.2:1", 3),
            registered("two", "http://10.0.0.3:1", model="a"),
            registered("two", "http://10.0.0.3:1", model="b"),
            registered("silent", None),
            registered("far", "http://192.168.0.1:1"),
        ],
        AllowList(["10.0.0.0/8"]),
    )
    assert {worker.worker_id for worker in addresses.unreachable} == {"silent", "far"}
    assert (addresses.models, len(addresses.targets)) == ({"m", "a", "b"}, 5)
    # When a process is gone, all of its ranks are gone, and no other worker of the name is.
    assert addresses.sharing(WorkerKey("m", "dp", 1)) == {WorkerKey("m", "dp", 0), WorkerKey("m", "dp", 1)}
    assert addresses.sharing(WorkerKey("m", "alone", 3)) == {WorkerKey("m", "alone", 3)}
    assert addresses.sharing(WorkerKey("m", "silent", 0)) == {WorkerKey("m", "silent", 0)}


@pytest.mark.parametrize(
    ("raw", "limit"),
    [
        (b'{"max_tokens": 5}', 5),
        (b'{"max_tokens": 5, "max_completion_tokens": 7}', 7),
        (b'{"max_output_tokens": 9}', 9),
        (b'{"max_tokens": 18446744073709551616}', 2**63 - 1),
        (b'{"max_tokens": null}', None),
        (b'{"max_tokens": true}', None),
        (b'{"max_tokens": -1}', None),
        (b'{"max_tokens": "many"}', None),
        (b"{}", None),
    ],
)
def test_limits_of_the_answers_length_are_read(raw: bytes, limit: int | None) -> None:
    assert openai_body(read_client_body("/v1/completions", raw)).limit_tokens == limit
