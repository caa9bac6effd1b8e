# SPDX-License-Identifier: Apache-2.0
"""With an API key, every route except the health paths requires it, with every method."""

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
    # Newer versions of FastAPI keep an included router as one route.
    routers = [getattr(route, "original_router", None) for route in cold.routes]
    all_routes = [*cold.routes, *(route for router in routers if router for route in router.routes)]
    paths = {route.path for route in all_routes if isinstance(route, Route)}
    # Hot paths are not routes of the application, but the document lists them.
    paths |= set(call(app, "GET", "/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()["paths"])
    # One path of each kind must be among them, so that the test is known to see that kind.
    assert {
        "/query",
        "/select",
        "/register",
        "/workers/{worker_id:name}",
        "/metrics",
        "/docs",
        "/openapi.json",
    } <= paths
    return paths


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
        for authorization in WRONG:
            answer = call(
                app, method, called, b"{}", headers={} if authorization is None else {"authorization": authorization}
            )
            if path in HEALTH_PATHS:
                assert answer.status in (200, 405), (method, authorization)
            else:
                assert answer.status == 401, (method, authorization)
                assert method == "HEAD" or answer.error["code"] == "invalid_api_key"
                assert KEY not in str(answer)
        if method == "GET" and path in ("/events", "/v1/events"):
            # With the key, the stream has no end.
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

    def watched(key_sent: bytes, right: bytes) -> bool:
        compared.append((key_sent, right))
        return compare(key_sent, right)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    app, _ = build(TinyCore(), api_key=KEY, api_keys_file=str(file))
    for key_sent, status in (("a", 401), (KEY[:-1], 401), (KEY, 200), ("a-key-of-the-file-1", 200)):
        compared.clear()
        assert call(app, "GET", "/workers", headers={"authorization": f"Bearer {key_sent}"}).status == status
        # Digests are compared, so that not even a length shows, and the comparison continues after the right key.
        assert len(compared) == 3
        assert {sent_digest for sent_digest, _ in compared} == {hashlib.sha256(key_sent.encode()).digest()}
        assert len({right for _, right in compared}) == 3
