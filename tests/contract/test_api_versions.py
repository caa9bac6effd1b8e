# SPDX-License-Identifier: Apache-2.0
"""Each of our endpoints is one endpoint at two paths, with and without `/v1`.

Paths of OpenAI's API below `/v1` keep their meaning.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.route.tokens.proxied_paths import PATHS
from kvrouter.router.serve.api.examples import EXAMPLES, MODEL, PATH_PARTS, SECOND_WORKER, SELECTION, WORKER
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.api.http.plain_head import plain_head
from tests.contract.api_support import Answer, TinyCore, TinyTokens, ask_app, build, call, exchange, hit

OURS = [way for way in EXAMPLES if way[1] not in PATHS and not way[1].startswith("/v1/")]
HOT = ("/query", "/query_by_hash", "/select", "/select_and_reserve")
COUNTED = "kvrouter_requests"


def prepared(path: str) -> tuple[HttpApi, MetricRegistry]:
    """Return an API with the workers and the reservation that the example of this path needs."""
    app, registry = build(TinyCore([hit(WORKER, 16, 32, 48)]), tokens=TinyTokens())
    for worker_id in (WORKER, SECOND_WORKER):
        call(app, "POST", "/register", {"worker_id": worker_id, "model": "m", "url": "http://h:1"})
    if "{selection_id}" in path or "{name}" in path:
        body = {"model": "m", "token_ids": [1], "selection_id": SELECTION}
        assert call(app, "POST", "/select_and_reserve", body).status == 200
    return app, registry


def counted(registry: MetricRegistry) -> dict[tuple[str, str], float]:
    """Return the number of requests by path and status."""
    counts = {}
    for family in registry.collect():
        if family.name == COUNTED:
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counts[sample.labels["path"], sample.labels["code"]] = sample.value
    return counts


def outcome(version: str, method: str, path: str) -> tuple[Answer, dict[tuple[str, str], float]]:
    """Send the path's example; return the answer and everything that was counted until then."""
    app, registry = prepared(path)
    text = json.dumps(EXAMPLES[method, path]).replace(MODEL, "m")
    target = version + path.format(**{name: value for name, (_, value) in PATH_PARTS.items()})
    return call(app, method, target, json.loads(text)), counted(registry)


@pytest.mark.parametrize(("method", "path"), OURS, ids=" ".join)
def test_an_endpoint_answers_alike_at_both_paths_and_is_counted_as_one(method: str, path: str) -> None:
    (old, old_count), (new, new_count) = (outcome(version, method, path) for version in ("", "/v1"))
    assert old.status == new.status < 300
    assert old.headers.keys() == new.headers.keys()
    if path != "/metrics":
        assert old.body == new.body
    assert old_count == new_count
    assert not [label for label, _ in new_count if label.startswith("/v1/")]


@pytest.mark.parametrize(("method", "path"), OURS, ids=" ".join)
def test_a_wrong_method_is_refused_alike(method: str, path: str) -> None:
    target = path.format(**{name: value for name, (_, value) in PATH_PARTS.items()})
    app, _ = prepared("")
    old, new = (call(app, "PUT", version + target, b"{}") for version in ("", "/v1"))
    assert (old.status, new.status) == (405, 405)
    assert (old.headers["allow"], old.error["code"]) == (new.headers["allow"], new.error["code"])


def test_events_are_below_the_version_too() -> None:
    app, _ = build(TinyCore())
    for version in ("", "/v1"):
        answer = call(app, "GET", f"{version}/events", query="type=nothing")
        assert (answer.status, answer.error["code"]) == (400, "invalid_body")


@pytest.mark.parametrize("path", HOT)
def test_a_plain_question_below_the_version_goes_the_short_way(path: str) -> None:
    body = json.dumps(EXAMPLES["POST", path]).replace(MODEL, "m").encode()
    app, _ = prepared("")
    for version in ("", "/v1"):
        sent = (
            f"POST {version}{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        head = plain_head(sent, app.plain_paths, app.forwarded_paths, app.plain_below, None, 1_000, 100)
        assert head is not None and head.path == path
    locked, _ = build(TinyCore(), api_key="secret")
    assert plain_head(sent, locked.plain_paths, locked.forwarded_paths, locked.plain_below, None, 1_000, 100) is None


@pytest.mark.parametrize(
    ("method", "part"), [("POST", "/prefill_complete"), ("POST", "/output_block"), ("DELETE", "")], ids=str
)
def test_a_reservation_below_the_version_ends_on_both_ways(method: str, part: str) -> None:
    app, registry = prepared("")
    line = f"{method} /v1/reservations/{SELECTION}{part} HTTP/1.1\r\nHost: localhost\r\n"
    length = "Content-Length: 0\r\n\r\n"
    short = f"{line}{length}".encode()
    head = plain_head(short, app.plain_paths, app.forwarded_paths, app.plain_below, None, 1_000, 100)
    assert head is not None

    def reserve() -> None:
        call(app, "POST", "/v1/select_and_reserve", {"model": "m", "token_ids": [1], "selection_id": SELECTION})

    reserve()
    # `respond_plain` returns the content alone, so the reservation ended on the fast path.
    assert app.respond_plain(head, short) == b'{"status":"ok"}'
    for sent in (short, f"{line}X-Unknown: 1\r\n{length}".encode()):
        reserve()
        received = asyncio.run(exchange(app, sent, hang_up=True))
        assert received.startswith(b"HTTP/1.1 200 ") and received.endswith(b'{"status":"ok"}')
    assert counted(registry)[f"/reservations/{{selection_id}}{part}", "200"] == 3


def test_paths_of_openai_clients_are_unchanged() -> None:
    app, _ = prepared("")
    for path in (*PATHS, "/v1/models", "/v1/models/m", "/v1/nowhere", "/v1/", "/v1", "/v1/v1/query", "/"):
        assert app.paths.unversioned(path) == path
        assert app.paths.spellings(path) == (path,)
    assert call(app, "GET", "/v1/models/m").json()["id"] == "m"
    # A model may have the name of an endpoint.
    assert call(app, "GET", "/v1/models/workers").error["code"] == "unknown_model"


@pytest.mark.parametrize(
    "path",
    ["/v1/tokenize", "/v1/nowhere", "/v1/docs", "/v1/openapi.json", "/v1/page/main.js", "/v1/v1/query", "/v2/query"],
)
def test_nothing_else_is_below_the_version(path: str) -> None:
    app, _ = prepared("")
    for method in ("GET", "POST"):
        assert asyncio.run(ask_app(app, method, path, b"{}")).error["code"] == "not_found"


def test_the_document_names_both_places() -> None:
    document: dict[str, Any] = call(build(TinyCore())[0], "GET", "/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            places = [server["url"] for server in operation.get("servers", ())]
            ours = path not in PATHS and not path.startswith("/v1/")
            assert places == (["/v1", "/"] if ours else [])
