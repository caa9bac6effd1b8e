# SPDX-License-Identifier: Apache-2.0
"""The rules for every endpoint (key, body limit, errors, counting); and health, readiness, metrics, version, docs."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import jsonschema
import pytest

from kvrouter.router.observe.findings.explanations import EXPLANATIONS
from kvrouter.router.route.tokens.proxied_paths import PATHS, STORED_PATHS
from kvrouter.router.serve.api.examples import EXAMPLES
from kvrouter.router.serve.api.http.http_api import HttpApi
from tests.contract.api_support import TinyCore, ask_app, build, call, exchange, hit

QUERY = {"model": "m", "token_ids": [1]}
KEY = "s3cret-key"
# One request for each way through the application: (method, path, body).
EVERY_WAY = [
    ("POST", "/query", QUERY),
    ("POST", "/register", {"worker_id": "w", "model": "m", "url": "http://h:1"}),
    ("GET", "/workers", None),
    ("GET", "/metrics", None),
    ("GET", "/docs", None),
    ("GET", "/openapi.json", None),
    ("GET", "/version", None),
    ("GET", "/nowhere", None),
]


@pytest.fixture
def core() -> TinyCore:
    return TinyCore([hit("w0", 1, 2, 3)])


@pytest.mark.parametrize(("method", "path", "body"), EVERY_WAY)
def test_all_paths_but_health_and_ready_require_the_key(core: TinyCore, method: str, path: str, body: Any) -> None:
    app, _ = build(core, api_key=KEY)
    for wrong in ({}, {"authorization": KEY}, {"authorization": f"Bearer {KEY}x"}, {"authorization": f"Basic {KEY}"}):
        answer = call(app, method, path, body, headers=wrong)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.body.decode()
    assert not core.registered and not core.asked
    right = call(app, method, path, body, headers={"authorization": f"bearer {KEY}"})
    assert right.status == (404 if path == "/nowhere" else 200)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_load_balancer_needs_no_key(core: TinyCore, path: str) -> None:
    assert call(build(core, api_key=KEY)[0], "GET", path).status == 200


@pytest.mark.parametrize("path", ["/query", "/register", "/nowhere"])
def test_a_body_over_the_limit_is_413_in_every_framing(core: TinyCore, path: str) -> None:
    app, _ = build(core, max_body_bytes=1024)
    for body in (b"x" * 1025, (b"x" * 1000, b"x" * 25), (b"x" * 1025,), (b"x",) * 1025):
        answer = call(app, "POST", path, body)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert answer.headers["connection"] == "close"


def test_a_body_of_exactly_the_limit_is_read(core: TinyCore) -> None:
    app, _ = build(core, max_body_bytes=1024)
    raw = b'{"model": "m", "token_ids": [1]}'.ljust(1024)
    assert call(app, "POST", "/query", raw).status == 200
    assert call(app, "POST", "/query", (raw[:7], b"", raw[7:])).status == 200


def test_a_false_content_length_reserves_no_memory(core: TinyCore) -> None:
    app, _ = build(core, max_body_bytes=1024)
    answer = call(app, "POST", "/query", b"{}", headers={"content-length": "99999999"}, with_length=False)
    assert answer.status == 413


def test_a_client_that_hangs_up_is_not_counted_as_an_error(core: TinyCore) -> None:
    app, registry = build(core)
    sent = b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
    assert asyncio.run(exchange(app, sent, hang_up=True)) == b""
    assert registry.get_sample_value("kvrouter_internal_errors_total", {"where": "/query"}) is None


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *(
            ("GET", "/query", "POST"),
            ("PUT", "/select", "POST"),
            ("PUT", "/register", "POST"),
            ("POST", "/health", "GET"),
        ),
        *(("PUT", "/workers", "GET, POST"), ("OPTIONS", "/workers/a/b", "DELETE, GET, PATCH")),
    ],
)
def test_a_wrong_method_is_405_and_says_which_is_right(core: TinyCore, method: str, path: str, allowed: str) -> None:
    answer = call(build(core)[0], method, path)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


def test_an_unknown_path_is_404(core: TinyCore) -> None:
    answer = call(build(core)[0], "GET", "/queries")
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "body", "label"),
    [
        ("POST", "/query", QUERY, "/query"),
        ("GET", "/workers", None, "/workers"),
        ("DELETE", "/workers/w0", None, "/workers/{worker_id}"),
    ],
)
def test_a_bug_is_500_logged_counted_and_shows_nothing(
    core: TinyCore, caplog: pytest.LogCaptureFixture, method: str, path: str, body: Any, label: str
) -> None:
    core.fail = RuntimeError("secret inside")
    app, registry = build(core)
    with caplog.at_level(logging.ERROR):
        answer = call(app, method, path, body)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.body.decode()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert registry.get_sample_value("kvrouter_internal_errors_total", {"where": label}) == 1
    assert registry.get_sample_value("kvrouter_requests_total", {"path": label, "code": "500"}) == 1


def test_requests_are_counted_by_template_never_by_what_the_client_sent(core: TinyCore) -> None:
    app, registry = build(core)
    for number in range(5):
        call(app, "GET", f"/nowhere/{number}")
        call(app, "DELETE", f"/workers/w{number}")
    call(app, "POST", "/query", QUERY)
    paths = {
        (sample.labels["path"], sample.labels["code"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "kvrouter_requests_total"
    }
    assert paths == {("other", "404"): 5, ("/workers/{worker_id}", "404"): 5, ("/query", "200"): 1}


def test_health_is_200_and_says_why_it_is_degraded(core: TinyCore, app: HttpApi) -> None:
    assert call(app, "GET", "/health").json() == {"status": "ok", "reasons": []}
    core.degraded = ["worker w0 is suspect"]
    answer = call(app, "GET", "/health")
    assert (answer.status, answer.json()) == (200, {"status": "degraded", "reasons": ["worker w0 is suspect"]})
    core.degraded, core.warned = [], ["Redis evicts"]
    assert call(app, "GET", "/health").json() == {"status": "ok", "reasons": [], "warnings": ["Redis evicts"]}


def test_ready_is_503_until_a_worker_can_be_chosen(core: TinyCore, app: HttpApi) -> None:
    core.unready = "no worker is registered"
    answer = call(app, "GET", "/ready")
    assert (answer.status, answer.error["code"]) == (503, "not_ready")
    assert "no worker is registered" in answer.error["message"]
    core.unready = None
    assert call(app, "GET", "/ready").json().items() >= {"status": "ready", "ready": True}.items()


def test_metrics_are_those_of_the_given_registry(core: TinyCore) -> None:
    app, registry = build(core)
    registry.task_failures.labels("mirror").inc(17)
    answer = call(app, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'kvrouter_task_failures_total{task="mirror"} 17.0' in answer.body.decode()


def test_two_apps_in_one_process_share_nothing() -> None:
    first, first_registry = build(TinyCore([hit("a", 1, 1, 1)]), api_key="first")
    second, second_registry = build(TinyCore([hit("b", 2, 2, 2)]))
    assert call(first, "POST", "/query", QUERY).status == 401
    assert set(call(second, "POST", "/query", QUERY).json()["instances"]) == {"b"}
    assert first_registry is not second_registry
    assert second_registry.get_sample_value("kvrouter_requests_total", {"path": "/query", "code": "401"}) is None


@pytest.mark.parametrize("query", ["model=a&model=b", "model=&model=", "x=1&x=1"])
def test_a_parameter_that_is_given_twice_is_refused(core: TinyCore, query: str) -> None:
    answer = call(build(core)[0], "GET", "/workers", query=query)
    assert answer.status == 400 and "given twice" in answer.json()["error"]["message"]


def test_the_version_is_answered(core: TinyCore) -> None:
    answer = call(build(core)[0], "GET", "/version").json()
    assert answer["name"] == "hybrid-kv-router"
    assert re.match(r"\d+\.\d+", answer["version"])


def test_the_openapi_document_lists_every_endpoint_and_all_its_references_lead_somewhere(core: TinyCore) -> None:
    document = call(build(core)[0], "GET", "/openapi.json").json()
    operations = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert operations == {
        ("GET", "/history"),
        ("GET", "/savings"),
        ("POST", "/query"),
        ("POST", "/query_by_hash"),
        ("POST", "/select"),
        ("POST", "/select_and_reserve"),
        ("POST", "/reservations"),
        ("DELETE", "/reservations/{selection_id}"),
        ("POST", "/reservations/{selection_id}/prefill_complete"),
        ("POST", "/reservations/{selection_id}/output_block"),
        ("GET", "/loads"),
        ("POST", "/register"),
        ("POST", "/unregister"),
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("GET", "/workers/{worker_id}"),
        ("PATCH", "/workers/{worker_id}"),
        ("DELETE", "/workers/{worker_id}"),
        ("POST", "/workers/{worker_id}/hand_over"),
        ("GET", "/hand_overs/{number}"),
        ("DELETE", "/hand_overs/{number}"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
        ("GET", "/decisions"),
        ("GET", "/decisions/{name}"),
        ("GET", "/events"),
        ("GET", "/diagnosis"),
        ("GET", "/diagnosis/{code}"),
        ("GET", "/settings"),
        ("GET", "/store"),
        *(("POST", path) for path in PATHS),
        *((method, path) for path, methods in STORED_PATHS.items() for method in methods),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/metrics"),
        ("GET", "/version"),
    }
    text = str(document)
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in text
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


def test_every_field_and_parameter_of_the_document_is_described(core: TinyCore) -> None:
    document = call(build(core)[0], "GET", "/openapi.json").json()
    fields = {
        f"{name}.{field}": shown
        for name, schema in document["components"]["schemas"].items()
        for field, shown in schema.get("properties", {}).items()
    }
    parameters = {
        f"{path} {parameter['name']}": parameter
        for path, operations in document["paths"].items()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
    }
    assert len(fields) > 200 and len(parameters) > 5
    assert not [name for name, shown in (fields | parameters).items() if not shown.get("description")]
    operations = [operation for operations in document["paths"].values() for operation in operations.values()]
    assert all(operation["summary"] for operation in operations)


def test_each_operation_with_a_body_names_the_answers_to_bodies_that_cannot_be_read(core: TinyCore) -> None:
    app = build(core)[0]
    document = call(app, "GET", "/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                assert {"413", "415"} <= operation["responses"].keys(), (method, path)
    # The document says what happens: here to each endpoint that is served without a proxy.
    for path in ("/query", "/select", "/register", "/reservations", "/reservations/x/output_block"):
        assert call(app, "POST", path, b"x", headers={"content-encoding": "br"}).status == 415
        assert "415" in document["paths"][path.replace("/x/", "/{selection_id}/")]["post"]["responses"]


def test_every_operation_has_an_example(core: TinyCore) -> None:
    document = call(build(core)[0], "GET", "/openapi.json").json()
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    # A stream has no end, so it has no example.
    del operations["GET", "/events"]
    assert operations.keys() == EXAMPLES.keys()
    for way, operation in operations.items():
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            if "multipart/form-data" in content:
                # A recording has no example in JSON.
                assert EXAMPLES[way] is None
                continue
            assert content["application/json"]["example"] == EXAMPLES[way]
            assert "example" not in content.get("application/msgpack", {})
        else:
            assert EXAMPLES[way] is None
    # FastAPI keeps the parts of the document, so a second document must be the same.
    assert call(build(core)[0], "GET", "/openapi.json").json() == document


def test_answers_fit_the_schemas_of_the_document(app: HttpApi) -> None:
    document = call(app, "GET", "/openapi.json").json()
    call(app, "POST", "/register", {"worker_id": "w", "model": "m", "url": "http://h:1"})
    for method, path, body in (
        ("POST", "/query", {**QUERY, "explain": True}),
        ("POST", "/query_by_hash", {"model": "m", "block_hashes": ["ff"]}),
        ("POST", "/select", {**QUERY, "explain": True}),
        ("GET", "/workers", None),
        ("GET", "/diagnosis", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/version", None),
    ):
        operation = document["paths"][path][method.lower()]
        answer = call(app, method, path, body).json()
        for part, value in ((operation.get("requestBody"), body), (operation["responses"]["200"], answer)):
            if part is not None:
                schema = {**part["content"]["application/json"]["schema"], "components": document["components"]}
                jsonschema.validate(value, schema)
    failed = call(app, "POST", "/query", {})
    schema = {"$ref": "#/components/schemas/ErrorReply", "components": document["components"]}
    jsonschema.validate(failed.json(), schema)


def test_every_code_of_a_finding_is_explained(app: HttpApi) -> None:
    for code, explanation in EXPLANATIONS.items():
        answer = call(app, "GET", f"/diagnosis/{code.lower()}").json()
        assert (answer["code"], answer["remedy"]) == (code, explanation.remedy)


def test_an_unknown_code_is_answered_with_the_nearest(app: HttpApi) -> None:
    answer = call(app, "GET", "/diagnosis/KV1101")
    assert answer.status == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_code" and "did you mean" in error["message"]


def test_the_docs_page_is_self_contained(core: TinyCore) -> None:
    answer = call(build(core)[0], "GET", "/docs")
    page = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/html")
    assert "POST /query_by_hash" in page and "PATCH /workers/{worker_id}" in page
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|https?://", page)


def test_the_document_declares_the_key(core: TinyCore) -> None:
    document = call(
        build(core, api_key=KEY)[0], "GET", "/openapi.json", headers={"authorization": f"Bearer {KEY}"}
    ).json()
    assert (document["security"], document["paths"]["/health"]["get"]["security"]) == ([{"key": []}], [])


def test_unusual_headers_are_no_error(core: TinyCore) -> None:
    app, _ = build(core, api_key=KEY)
    answer = asyncio.run(ask_app(app, "POST", "/query", b"{}", {"authorization": "Bearer \xff\xfe", "accept": "\xff"}))
    assert answer.status == 401
