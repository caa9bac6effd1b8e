# SPDX-License-Identifier: Apache-2.0
"""Requests that a web page makes a browser send.

At a router without a key, no such request reads or changes anything, and requests of other clients are accepted as
before.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.routing import APIRoute

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PATHS
from kvrouter.router.serve.access.browser_policy import MAX_KNOWN_HOSTS
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.openapi import EVENTS, HOT_OPERATIONS
from tests.contract.api_support import TinyCore, build, call, exchange

EVIL = "evil.example"
KEY = "correct-horse-battery"
WORKER = {"worker_id": "w9", "model": "m", "url": "http://w9:8000"}
HASHES = {"model": "m", "block_hashes": [1]}
SAFE = ("GET", "HEAD", "OPTIONS")


def routes() -> list[tuple[str, str]]:
    """Return every method and path of the API, the proxied ones included."""
    app, _ = build(TinyCore())
    cold = [route for route in app.cold.state.routes if isinstance(route, APIRoute)]  # type: ignore[attr-defined]
    served = [(method, route.path_format) for route in cold for method in route.methods or ()]
    hot = [("POST", operation[0]) for operation in HOT_OPERATIONS]
    named = [*served, *hot, ("GET", EVENTS), *(("POST", path) for path in PATHS)]
    assert len(named) > 30
    return [(method, path.replace("{", "").replace("}", "")) for method, path in sorted(named)]


ROUTES = routes()
CHANGES = [route for route in ROUTES if route[0] not in SAFE]


def refused(registry: MetricRegistry, reason: str) -> float | None:
    return registry.get_sample_value("kvrouter_foreign_requests_total", {"reason": reason})


# The host for which the browser takes the router:


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=map(" ".join, ROUTES))
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
def test_no_path_answers_a_page_whose_name_points_here(core: TinyCore, bound: str, method: str, path: str) -> None:
    app, registry = build(core, host=bound)
    answer = call(app, method, path, WORKER if method != "GET" else None, host=f"{EVIL}:30000")
    assert answer.status == 403
    assert method == "HEAD" or answer.error["code"] == "foreign_host"
    assert EVIL in answer.error["message"] and "allowed_hosts" in answer.error["message"]
    assert not core.registered and refused(registry, "host") == 1.0


LOOPBACK = (
    "localhost",
    "LocalHost:30000",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1",
    "127.8.9.1:30000",
    "[::1]:30000",
)
ADDRESSES = ("10.1.2.3", "10.1.2.3:30000", "[2001:db8::1]:80", "169.254.1.1", "[::ffff:10.0.0.1]")
NAMES = (EVIL, f"127.0.0.1.{EVIL}", f"localhost.{EVIL}", "router", "router.ns.svc", "xlocalhost", "0x7f000001.example")


@pytest.mark.parametrize(
    ("settings", "admitted", "foreign"),
    [
        ({}, LOOPBACK, (*ADDRESSES, *NAMES)),
        ({"host": "localhost"}, LOOPBACK, (*ADDRESSES, *NAMES)),
        ({"host": "::1"}, LOOPBACK, (*ADDRESSES, *NAMES)),
        ({"host": "0.0.0.0"}, (*LOOPBACK, *ADDRESSES), NAMES),
        ({"host": "10.1.2.3"}, (*LOOPBACK, *ADDRESSES), NAMES),
        ({"host": "Router"}, (*LOOPBACK, *ADDRESSES, "router:30000"), (EVIL, "router.ns.svc")),
        (
            {"allowed_hosts": ("router", "*.svc")},
            (*LOOPBACK, "router", "ROUTER.:80", "router.ns.svc"),
            (EVIL, "10.1.2.3"),
        ),
        ({"allowed_hosts": ("10.0.0.0/8",)}, (*LOOPBACK, "10.1.2.3:30000"), (EVIL, "11.1.2.3", "router")),
        ({"tls_client_ca": None, "allowed_hosts": ("evil.example",)}, (EVIL,), (f"a.{EVIL}",)),
        # A page has no key to show.
        ({"api_key": KEY}, (*LOOPBACK, *ADDRESSES, *NAMES), ()),
    ],
)
def test_only_admitted_hosts_are_accepted(
    core: TinyCore, settings: dict[str, Any], admitted: tuple[str, ...], foreign: tuple[str, ...]
) -> None:
    app, _ = build(core, **settings)
    key = {"authorization": f"Bearer {KEY}"} if "api_key" in settings else {}
    for host in admitted:
        # Send it twice, since the second request takes the fast path, on the paths that have one.
        for _ in range(2):
            assert call(app, "GET", "/workers", host=host, headers=key).status == 200, host
            assert call(app, "POST", "/query_by_hash", HASHES, host=host, headers=key).status == 200, host
    # Send the foreign hosts after the admitted ones were remembered.
    for host in foreign:
        assert call(app, "GET", "/workers", host=host).status == 403, host
        assert call(app, "POST", "/query_by_hash", HASHES, host=host).status == 403, host


def test_a_request_for_another_target_is_judged_by_that(app: HttpApi) -> None:
    for target, status in ((f"http://{EVIL}/workers", b"403"), ("http://localhost:30000/workers", b"200")):
        for host in ("localhost", EVIL):
            sent = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
            # RFC 9112, 3.2.2: the target's own host counts.
            assert asyncio.run(exchange(app, sent)).split()[1] == status, (target, host)


def test_a_request_without_a_host_is_accepted(app: HttpApi) -> None:
    for sent in (b"GET /ready HTTP/1.0\r\n\r\n", b"GET /ready HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n"):
        assert asyncio.run(exchange(app, sent)).split()[1] == b"200"


def test_many_admitted_hosts_do_not_fill_the_memory(app: HttpApi) -> None:
    for number in range(MAX_KNOWN_HOSTS + 10):
        assert call(app, "GET", "/ready", host=f"localhost:{number}").status == 200
        assert call(app, "GET", "/ready", host=f"{number}.example").status == 403
    assert app.known_hosts is not None and len(app.known_hosts) == MAX_KNOWN_HOSTS


# The page from which the request comes:

FOREIGN = (
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:8080"},
    {"origin": "http://127.0.0.1:30000"},
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://[localhost:30000"},
)
OWN: tuple[dict[str, str], ...] = (
    {},
    {"origin": "http://localhost:30000"},
    {"origin": "http://LOCALHOST:30000", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
)


@pytest.mark.parametrize(("method", "path"), CHANGES, ids=map(" ".join, CHANGES))
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", None])
def test_no_path_that_changes_anything_takes_a_request_of_a_foreign_page(
    core: TinyCore, kind: str | None, method: str, path: str
) -> None:
    app, registry = build(core)
    typed = {} if kind is None else {"content-type": kind}
    for page in FOREIGN[:3]:
        answer = call(app, method, path, WORKER, host="localhost:30000", headers=page | typed)
        assert answer.status == 403 and answer.error["code"] == "foreign_origin", page
    assert "cors_origins" in answer.error["message"] and refused(registry, "origin") == 3.0
    assert not core.registered


def test_pages_of_other_origins_are_foreign(core: TinyCore, app: HttpApi) -> None:
    for page in FOREIGN:
        assert call(app, "POST", "/register", WORKER, host="localhost:30000", headers=page).status == 403, page
        # A read is answered, but the browser does not show the answer to the page.
        assert call(app, "GET", "/workers", host="localhost:30000", headers=page).status == 200, page
    assert not core.registered
    for number, page in enumerate(OWN):
        worker = WORKER | {"worker_id": f"w{number}"}
        assert call(app, "POST", "/register", worker, host="localhost:30000", headers=page).status == 200, page
    assert len(core.registered) == len(OWN)


def test_a_key_does_not_make_a_page_less_foreign_and_a_listed_origin_does(core: TinyCore) -> None:
    # A gateway may add the key to every request that it gets.
    key = {"authorization": f"Bearer {KEY}"}
    for settings in ({"api_key": KEY}, {"api_key": KEY, "cors_origins": ("https://app.example",)}):
        app, _ = build(core, **settings)
        assert call(app, "POST", "/register", WORKER, headers=key | FOREIGN[0]).status == 403
        assert not core.registered
    listed = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    assert call(app, "POST", "/register", WORKER, headers=key | listed).status == 200
    app, _ = build(core, cors_origins=("*",))
    assert call(app, "POST", "/register", WORKER, headers=FOREIGN[0]).status == 200


# Bodies of types that a page may send without a preflight:


@pytest.mark.parametrize("kind", ["text/plain", "Text/Plain;charset=UTF-8", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize(("method", "path"), CHANGES, ids=map(" ".join, CHANGES))
def test_plain_text_and_forms_are_no_json(core: TinyCore, app: HttpApi, kind: str, method: str, path: str) -> None:
    answer = call(app, method, path, WORKER, headers={"content-type": kind})
    if path in AUDIO:
        # These paths take forms.
        assert answer.status != 415
    else:
        assert answer.status == 415 and answer.error["code"] == "unsupported_media_type"
        assert "application/json" in answer.error["message"]
    assert not core.registered


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/x-www-form-urlencoded", "APPLICATION/JSON", "*/*", "text/json"]
)
def test_curls_own_type_and_all_others_are_json(core: TinyCore, app: HttpApi, kind: str | None) -> None:
    typed = {} if kind is None else {"content-type": kind}
    assert call(app, "POST", "/register", WORKER, headers=typed).status == 200
    assert call(app, "POST", "/query_by_hash", HASHES, headers=typed).status == 200
    assert len(core.registered) == 1


def test_a_router_listens_on_this_host_alone_by_default() -> None:
    assert Config().host == "127.0.0.1" and Config().allowed_hosts == ()
