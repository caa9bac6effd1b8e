# SPDX-License-Identifier: Apache-2.0
"""With an API key, only the health paths answer without it: every route there is, by every method."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from tests.contract.api_support import TinyCore, build, call, hit

KEY = "correct-horse-battery"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
HEALTH_PATHS = {"/health", "/ready", "/v1/health", "/v1/ready"}
WRONG = (
    None,
    "",
    KEY,
    f"Basic {KEY}",
    "Bearer",
    "Bearer ",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Bearer {KEY.upper()}",
    f"Bearer x{KEY}",
    f"Bearer {KEY} {KEY}",
    "Bearer " + "x" * 10_000,
    "Bearer schl\xfcssel",
)


def routes() -> set[str]:
    app, _ = build(TinyCore(), api_key=KEY)
    cold = app.cold
    assert isinstance(cold, FastAPI)
    # Newer versions of FastAPI keep an included router whole.
    routers = [getattr(route, "original_router", None) for route in cold.routes]
    known = [*cold.routes, *(route for router in routers if router for route in router.routes)]
    found = {route.path for route in known if isinstance(route, Route)}
    # Hot paths are in no application, and in the document.
    found |= set(call(app, "GET", "/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()["paths"])
    # One of each kind, so that the walk is known to see them.
    assert {
        "/query",
        "/select",
        "/register",
        "/workers/{worker_id:name}",
        "/metrics",
        "/docs",
        "/openapi.json",
    } <= found
    return found


@pytest.mark.parametrize(
    "path",
    sorted(
        {version + path for path in routes() for version in ("", "/v1")}
        | {"/", "/nothing", "/health/x", "//health", "/health/", "/query/../health"}
        | {"/v1//health", "//v1/health", "/v1/v1/health", "/v1/health/x", "/v1/../health", "/v1", "/v1/"}
    ),
)
def test_no_path_but_health_is_open(path: str) -> None:
    core = TinyCore([hit("w0", 16, 32, 48)])
    app, _ = build(core, api_key=KEY)
    called = path.replace("{worker_id:name}", "w0").replace("{worker_id}", "w0")
    for method in METHODS:
        for given in WRONG:
            answer = call(app, method, called, b"{}", headers={} if given is None else {"authorization": given})
            if path in HEALTH_PATHS:
                assert answer.status in (200, 405), (method, given)
            else:
                assert answer.status == 401, (method, given)
                assert method == "HEAD" or answer.error["code"] == "invalid_api_key"
                assert KEY not in str(answer)
        if method == "GET" and path in ("/events", "/v1/events"):
            # With the key it has no end.
            continue
        right = call(app, method, called, b"{}", headers={"authorization": f"Bearer {KEY}"})
        assert right.status != 401, method
    assert not core.registered


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        "keys: [{name: a, scopes: [watch], key: a-key-of-the-file-1}, {name: b, scopes: [ask], key: a-key-of-the-file-2}]"
    )
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watched(given: bytes, right: bytes) -> bool:
        compared.append((given, right))
        return compare(given, right)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    app, _ = build(TinyCore(), api_key=KEY, api_keys_file=str(file))
    for given, status in (("a", 401), (KEY[:-1], 401), (KEY, 200), ("a-key-of-the-file-1", 200)):
        compared.clear()
        assert call(app, "GET", "/workers", headers={"authorization": f"Bearer {given}"}).status == status
        # Digests, so that not even a length shows; and none is left out behind the right one.
        assert len(compared) == 3
        assert {one for one, _ in compared} == {hashlib.sha256(given.encode()).digest()}
        assert len({right for _, right in compared}) == 3
