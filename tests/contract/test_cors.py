# SPDX-License-Identifier: Apache-2.0
"""The answers that a browser shows to a page of another origin.

They are shown only to listed origins, on every path, and to no page without the setting. Requests that such a page may
make are in test_browser_pages.py.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from kvrouter.router.route.tokens.proxied_paths import PATHS
from kvrouter.router.serve.api.http.cors import EXPOSED
from tests.contract.proxy_support import CHAT, RAW, WAIT_S, ProxyServer, fleet
from tests.support.scripted_engine import Script, plain, stream

APP, OTHER = "https://app.example", "https://other.example"
# The headers of an engine that has CORS rules itself; vLLM's default allows all origins.
ENGINE_CORS = ["access-control-allow-origin: *", "access-control-allow-credentials: true"]
OK = plain(b"ok", headers=ENGINE_CORS)
QUERY = b'{"model": "m", "token_ids": [1]}'
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-session-id"}

Sent = tuple[int, dict[str, str]]


def sent(router: ProxyServer, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Sent:
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=WAIT_S)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        answer.read()
        headers_received: dict[str, str] = {}
        for name, value in answer.getheaders():
            headers_received[name.lower()] = (
                f"{headers_received[name.lower()]}, {value}" if name.lower() in headers_received else value
            )
        return answer.status, headers_received
    finally:
        connection.close()


def requests() -> Iterator[tuple[str, str, bytes | None, int]]:
    """Yield successes and errors of each way that an answer can take."""
    yield from (("POST", path, RAW, 200) for path in sorted(PATHS))
    yield ("POST", CHAT, b"no JSON", 400)
    yield ("POST", CHAT, b'{"model": "nobody"}', 404)
    yield ("POST", CHAT, b" " * 5_000, 413)
    yield ("GET", CHAT, None, 405)
    yield ("POST", "/query", QUERY, 200)
    yield ("POST", "/query", b"[", 400)
    yield ("POST", "/select", b'{"model": "nobody", "token_ids": [1]}', 404)
    yield ("GET", "/health", None, 200)
    yield ("GET", "/workers", None, 200)
    yield ("GET", "/nowhere", None, 404)
    yield ("OPTIONS", "/nowhere", None, 404)


CASES = list(requests())
IDS = [f"{method} {path} {status}" for method, path, _, status in CASES]


@pytest.fixture(scope="module")
def listed() -> Iterator[ProxyServer]:
    with fleet(OK, cors_origins=(APP, "http://localhost:5173"), max_body_bytes=4_096) as (router, _):
        yield router


@pytest.fixture(scope="module")
def silent() -> Iterator[ProxyServer]:
    with fleet(OK, max_body_bytes=4_096) as (router, _):
        yield router


def cors_of(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control-") or name == "vary"}


def foreign(method: str, status: int) -> int:
    """Return the status that a page of an origin that is not listed gets in place of this one."""
    return 403 if method == "POST" else status


@pytest.mark.parametrize(("method", "path", "body", "status"), CASES, ids=IDS)
def test_every_answer_names_the_listed_origin(
    listed: ProxyServer, method: str, path: str, body: bytes | None, status: int
) -> None:
    for origin in (APP, "http://localhost:5173"):
        got, headers = sent(listed, method, path, body, origin=origin)
        assert got == status
        assert cors_of(headers) == {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED.decode(),
            "vary": "Origin",
        }


@pytest.mark.parametrize(("method", "path", "body", "status"), CASES, ids=IDS)
def test_other_origins_are_not_named(
    listed: ProxyServer, method: str, path: str, body: bytes | None, status: int
) -> None:
    for origin in (OTHER, APP + ".evil", APP + ":8443", "null", APP.upper()):
        got, headers = sent(listed, method, path, body, origin=origin)
        assert (got, cors_of(headers)) == (foreign(method, status), {"vary": "Origin"})


@pytest.mark.parametrize(("method", "path", "body", "status"), CASES, ids=IDS)
def test_without_the_setting_no_answer_has_a_cors_header(
    silent: ProxyServer, method: str, path: str, body: bytes | None, status: int
) -> None:
    got, headers = sent(silent, method, path, body, origin=APP, **PREFLIGHT)  # type: ignore[arg-type]
    assert (got, cors_of(headers)) == (foreign(method, status), {})


def test_without_the_setting_a_preflight_is_a_wrong_method(silent: ProxyServer) -> None:
    for path in (CHAT, "/query", "/workers"):
        status, headers = sent(silent, "OPTIONS", path, origin=APP, **PREFLIGHT)  # type: ignore[arg-type]
        assert (status, cors_of(headers)) == (405, {})


@pytest.mark.parametrize("path", [*sorted(PATHS), "/query", "/workers", "/health", "/events", "/", "/nowhere"])
def test_a_preflight_needs_no_key(path: str) -> None:
    with fleet(OK, cors_origins=(APP,), api_key="secret") as (router, engine):
        status, headers = sent(router, "OPTIONS", path, origin=APP, **PREFLIGHT)  # type: ignore[arg-type]
        assert status == 204
        assert headers["access-control-allow-origin"] == APP
        assert headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert {"GET", "POST", "PATCH", "DELETE"} == set(headers["access-control-allow-methods"].split(", "))
        assert headers["vary"] == "Access-Control-Request-Headers, Origin"
        # The request that follows the preflight needs the key.
        if path in PATHS:
            status, headers = sent(router, "POST", path, RAW, origin=APP)
            assert (status, headers["access-control-allow-origin"]) == (401, APP)
        # An OPTIONS request from another origin is not treated as a preflight, and has no key.
        status, headers = sent(router, "OPTIONS", path, origin=OTHER, **PREFLIGHT)  # type: ignore[arg-type]
        assert status != 204 and cors_of(headers) == {"vary": "Origin"}
        assert not engine.asked


def test_a_star_allows_all_and_varies_by_nothing() -> None:
    with fleet(OK, cors_origins=("*",)) as (router, _):
        _, headers = sent(router, "POST", CHAT, RAW, origin=OTHER)
        expected = {"access-control-allow-origin": "*", "access-control-expose-headers": EXPOSED.decode()}
        assert cors_of(headers) == expected
        _, headers = sent(router, "POST", "/query", QUERY, origin=OTHER)
        assert cors_of(headers) == expected
        # A client that names no origin is not a script in a browser.
        assert cors_of(sent(router, "POST", CHAT, RAW)[1]) == {}


def test_the_plain_way_is_not_taken_with_an_origin_and_says_the_same(listed: ProxyServer) -> None:
    plain_headers: dict[str, Any] = sent(listed, "POST", "/query", QUERY)[1]
    # A request that arrives in two pieces takes the general way, whose answer has a `vary` header.
    plain_headers.pop("vary", None)
    assert cors_of(plain_headers) == {}
    origin_headers = sent(listed, "POST", "/query", QUERY, origin=APP)[1]
    assert origin_headers.pop("access-control-allow-origin") == APP
    assert {name for name in origin_headers if name not in plain_headers} == {"access-control-expose-headers", "vary"}


@pytest.mark.parametrize("script", [stream([b"data: 1\n\n", b"data: 2\n\n"]), plain(b"no", status="500 Broken")])
def test_streams_and_errors_of_engines_have_them(script: Script) -> None:
    with fleet(script, cors_origins=(APP,)) as (router, _):
        _, headers = sent(router, "POST", CHAT, RAW, origin=APP)
        assert headers["access-control-allow-origin"] == APP


def test_the_page_shows_an_engine_that_is_gone() -> None:
    with fleet(OK, cors_origins=(APP,)) as (router, engine):
        engine.__exit__()
        status, headers = sent(router, "POST", CHAT, RAW, origin=APP)
        assert (status, headers["access-control-allow-origin"]) == (502, APP)
