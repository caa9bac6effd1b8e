# SPDX-License-Identifier: Apache-2.0
"""API keys with scopes: every route has a scope, keys change while the router runs, and registrations have a rate.

The table of scopes is compared with the routes, so that a new route cannot be missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.config import reloaded
from kvrouter.router.route.tokens.proxied_paths import PATHS, STORED_PATHS
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.access.scope import Scope
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.openapi import EVENTS, HOT_OPERATIONS
from kvrouter.router.serve.api.scopes import ADMIN, ANY, SCOPES, Route, RouteTable
from tests.contract.api_support import Answer, TinyCore, ask_app, build, call

WAIT_S = 20.0
OPEN = {"/health", "/ready"}
# A key for each scope, with the scope's name.
KEYS = {scope: f"the-key-with-the-scope-{scope}" for scope in Scope}
SETTING_KEY = "the-key-of-the-setting"


def routes() -> list[Route]:
    """Return all routes that the API has, independent of the table of scopes."""
    app, _ = build(TinyCore())
    cold = [route for route in app.cold.state.routes if isinstance(route, APIRoute)]  # type: ignore[attr-defined]
    cold_routes = [(method, route.path_format) for route in cold for method in route.methods or ()]
    assert len(cold_routes) > 20
    return [
        *cold_routes,
        ("GET", EVENTS),
        *((method, path) for path, methods in STORED_PATHS.items() for method in methods),
        *(("POST", path) for path in (*PATHS, *(operation[0] for operation in HOT_OPERATIONS))),
    ]


def listed(*keys: tuple[str, list[Scope], str]) -> str:
    lines = [f"- {{name: {name}, scopes: [{', '.join(scopes)}], key: {key}}}" for name, scopes, key in keys]
    return "\n".join(["keys:", *lines])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(listed(*((scope.value, [scope], key) for scope, key in KEYS.items())))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def path_of(route: Route) -> str:
    return route[1].replace("{worker_id}", "w0").replace("{selection_id}", "s").replace("{", "").replace("}", "")


def test_every_route_has_a_scope_and_every_scope_a_route() -> None:
    served = routes()
    assert set(served) <= set(SCOPES), "a new route needs a line in router/serve/api/scopes.py"
    assert set(SCOPES) <= set(served), "the table names what is not served"
    assert all(scopes for scopes in SCOPES.values())


def test_a_route_that_the_table_misses_takes_admin_alone(app: HttpApi) -> None:
    cold = app.cold.state.routes  # type: ignore[attr-defined]
    table = RouteTable(cold, [("POST", "/new")])
    assert table.scopes("POST", "/new") == ADMIN
    assert table.scopes("GET", "/nothing") == table.scopes("TRACE", "/workers") == ANY


@pytest.mark.parametrize("route", sorted(routes()), ids=" ".join)
def test_each_scope_admits_its_routes_alone(core: TinyCore, file: Path, route: Route) -> None:
    app, _ = build(core, api_keys_file=str(file), api_key=SETTING_KEY)
    method, path = route[0], path_of(route)
    for scope, key in KEYS.items():
        wanted = SCOPES[route]
        admitted = scope is Scope.ADMIN or scope in wanted or path in OPEN
        # `ask` includes `proxy` and `hits`, because keys had `ask` before those two existed.
        admitted = admitted or (scope is Scope.ASK and not {Scope.PROXY, Scope.HITS}.isdisjoint(wanted))
        if (method, path) == ("GET", EVENTS) and admitted:
            # An admitted stream of events has no end.
            continue
        answer = call(app, method, path, b"{}", headers=bearer(key))
        if admitted:
            assert answer.status not in (401, 403), (scope, answer)
        elif not path.startswith("/page/"):
            assert answer.status == 403, (scope, answer)
            assert answer.error["code"] == "missing_scope"
            # The message names the key, and the scopes that the route accepts.
            message = answer.error["message"]
            assert f"the API key {scope} has the scope {scope}," in message
            assert any(wanted in message.partition("takes one with")[2] for wanted in SCOPES[route])
            assert key not in message
    if (method, path) != ("GET", EVENTS):
        assert call(app, method, path, b"{}", headers=bearer(SETTING_KEY)).status not in (401, 403)
    assert call(app, method, path, b"{}", headers=bearer("x" * 20)).status == (200 if path in OPEN else 401)


@pytest.mark.parametrize(
    "path",
    [
        "/WORKERS",
        "/workers/",
        "/workers//",
        "/register/",
        "//register",
        "/workers/w0/x",
        "/%72egister",
        "/workers%2Fw0",
    ],
)
def test_no_spelling_of_a_path_gets_past_its_scope(core: TinyCore, file: Path, path: str) -> None:
    app, _ = build(core, api_keys_file=str(file))
    for method in ("GET", "POST", "PATCH", "DELETE"):
        sent = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[Scope.ASK]}\r\n"
        body = b'{"worker_id": "w9", "model": "m", "url": "http://w9:1"}'
        answer = asyncio.run(
            raw(app, sent.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        )
        # The request is refused, or there is no such route; it is never carried out.
        assert answer.split()[1] in (b"403", b"404", b"405"), (method, answer)
    assert not core.registered


async def raw(app: HttpApi, sent: bytes) -> bytes:
    from tests.contract.api_support import exchange

    return await exchange(app, sent)


def sample(registry: MetricRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"kvrouter_{name}", labels)


def test_requests_are_counted_by_the_name_of_their_key(core: TinyCore, file: Path) -> None:
    app, registry = build(core, api_keys_file=str(file))
    for key in (KEYS[Scope.WATCH], KEYS[Scope.WATCH], KEYS[Scope.ASK], "x" * 20):
        call(app, "GET", "/workers", headers=bearer(key))
    call(app, "GET", "/health")
    counted = {
        ("watch", "admitted"): 2.0,
        ("ask", "forbidden"): 1.0,
        ("ask", "admitted"): 0.0,
        ("unknown", "unauthorized"): 1.0,
    }
    for (name, outcome), value in counted.items():
        assert sample(registry, "key_requests_total", key=name, outcome=outcome) == value


# Key files that change.


class Watched:
    """An API that polls its key file every 10 ms while the files are watched."""

    def __init__(self, core: TinyCore, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(reloaded, "POLL_S", 0.01)
        instances: list[Access] = []

        def keep(*arguments: object, **more: object) -> Access:
            instances.append(Access(*arguments, **more))  # type: ignore[arg-type]
            return instances[-1]

        monkeypatch.setattr("kvrouter.router.serve.api.http.fastapi_app.Access", keep)
        self.app, self.registry = build(core, **settings)
        self.access = instances[0]

    async def until(self, key: str, status: int) -> Answer:
        """Send requests with the key until the answer has this status, and return the answer."""
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = await ask_app(self.app, "GET", "/workers", headers=bearer(key))
            if answer.status == status:
                return answer
            assert time.monotonic() < deadline, f"{answer.status} in place of {status}"
            await asyncio.sleep(0.01)


@pytest.fixture
def watched(core: TinyCore, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    yield Watched(core, monkeypatch, api_keys_file=str(file))


def write(file: Path, text: str | None) -> None:
    """Write the file, or delete it if the text is None."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


async def test_keys_are_changed_without_a_restart_and_a_broken_file_changes_nothing(
    watched: Watched, file: Path
) -> None:
    old, new = KEYS[Scope.WATCH], "the-new-key-to-watch-with"
    watching = asyncio.create_task(watched.access.settings.files.watch())
    try:
        # Both keys are valid at the same time, so that clients can change one after the other.
        write(file, listed(("watch", [Scope.WATCH], old), ("new", [Scope.WATCH], new)))
        await watched.until(new, 200)
        await watched.until(old, 200)
        write(file, listed(("new", [Scope.WATCH], new)))
        await watched.until(old, 401)
        assert sample(watched.registry, "key_requests_total", key="watch", outcome="admitted") is None
        taken = sample(watched.registry, "access_reloads_total", file="api_keys", outcome="taken")
        assert taken == 2.0

        async def reasons() -> list[str]:
            return list((await ask_app(watched.app, "GET", "/health")).json()["reasons"])

        for broken in ("keys: [", None):
            write(file, broken)
            deadline = time.monotonic() + WAIT_S
            while not any("the former is used" in reason for reason in await reasons()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert sample(watched.registry, "access_file_stale", file="api_keys") == 1.0
            await watched.until(new, 200)
            write(file, listed(("new", [Scope.WATCH], new)))
            while await reasons():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert sample(watched.registry, "access_file_stale", file="api_keys") == 0.0
        refused = sample(watched.registry, "access_reloads_total", file="api_keys", outcome="refused")
        assert refused == 2.0
    finally:
        watching.cancel()


# The rate of registrations.


def body(number: int) -> dict[str, str]:
    return {"worker_id": f"w{number}", "model": "m", "url": f"http://w{number}:8000"}


@pytest.mark.parametrize("key", [None, KEYS[Scope.REGISTER]], ids=["without keys", "with one"])
def test_registrations_that_come_too_fast_are_refused_and_nothing_else_is(
    core: TinyCore, file: Path, key: str | None
) -> None:
    more: dict[str, Any] = {} if key is None else {"api_keys_file": str(file)}
    # The rate allows a burst of four for each of max_workers, and then almost none.
    app, registry = build(core, max_workers=2, registrations_per_s=0.01, **more)
    headers = {} if key is None else bearer(key)
    sent = [
        ("POST", "/register", body(0)),
        ("POST", "/workers", body(1)),
        ("PATCH", "/workers/w0", {"state": "draining"}),
        ("DELETE", "/workers/w0", None),
        ("POST", "/unregister", {"worker_id": "w1"}),
        ("POST", "/register", body(2)),
        ("POST", "/register", body(3)),
        ("POST", "/register", body(4)),
    ]
    assert [call(app, method, path, payload, headers=headers).status for method, path, payload in sent] == [200] * 8
    for method, path, payload in sent:
        late = call(app, method, path, payload, headers=headers)
        assert late.status == 429 and late.error["code"] == "too_many_registrations"
        assert late.error["type"] == "rate_limit_error"
        assert 90 <= int(late.headers["retry-after"]) <= 100
    assert len(core.registered) == 3
    assert sample(registry, "registrations_limited_total") == 8.0
    # Reads and queries are not limited, and neither is another key.
    ask_headers = {} if key is None else bearer(KEYS[Scope.ASK])
    assert call(app, "GET", "/workers", headers=headers).status == 200
    assert call(app, "POST", "/query_by_hash", {"model": "m", "block_hashes": [1]}, headers=ask_headers).status == 200
    if key is not None:
        assert call(app, "POST", "/register", body(9), headers=bearer(KEYS[Scope.ADMIN])).status == 200


def test_a_fleet_of_a_thousand_may_come_and_go_at_once(app: HttpApi) -> None:

    async def come() -> list[int]:
        return [
            (
                await ask_app(app, "POST", "/register", b'{"worker_id": "w%d", "model": "m", "url": "http://w:1"}' % n)
            ).status
            for n in range(1_000)
        ]

    assert asyncio.run(come()) == [200] * 1_000
