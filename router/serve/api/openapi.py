# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, and a page that lists it. Both are self-contained: nothing is loaded from the internet."""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
from fastapi import FastAPI

from kvrouter.contract import (
    choices,
    decisions,
    diagnosis,
    errors,
    fields,
    hand_overs,
    health,
    history,
    loads,
    models,
    queries,
    registrations,
    reservations,
    settings,
    store,
    worker_status,
)
from kvrouter.contract.fleet_event import EventType
from kvrouter.router.route.tokens.proxied_paths import AUDIO, PROXIED, STORED_RESPONSE
from kvrouter.router.serve.api.examples import EXAMPLES, PATH_PARTS
from kvrouter.router.serve.api.requests import MSGPACK
from kvrouter.router.serve.api.responses import JSON
from kvrouter.router.serve.api.versioned_paths import VERSION

EVENTS = "/events"
SCHEMA_REF = "#/components/schemas/{name}"

# Every struct that an operation below or in the route modules refers to; nested structs are included with them.
SCHEMAS = (
    queries.QueryBody,
    queries.QueryByHashBody,
    queries.QueryReply,
    choices.SelectBody,
    choices.SelectReply,
    reservations.ReservationBody,
    reservations.ReservedReply,
    reservations.EndedReply,
    loads.ModelLoadReply,
    registrations.RegisterBody,
    registrations.UnregisterBody,
    registrations.WorkerPatch,
    registrations.RegisteredReply,
    registrations.DescribedReply,
    registrations.ChangedReply,
    hand_overs.HandOverBody,
    hand_overs.HandOverReply,
    worker_status.WorkersReply,
    decisions.DecisionReply,
    decisions.DecisionsReply,
    models.ModelReply,
    models.ModelsReply,
    health.HealthReply,
    health.ReadyReply,
    health.VersionReply,
    diagnosis.DiagnosisReport,
    diagnosis.ExplainedCode,
    settings.SettingsReply,
    store.StoreReply,
    history.HistoryReply,
    history.SavingsReply,
    errors.ErrorReply,
)

# The possible problems, by status. No operation has a `default` answer: clients and the fuzzer must know which ones to
# expect.
PROBLEMS = {
    400: "The body or a parameter does not fit the endpoint",
    401: "The API key is missing or wrong",
    403: "The API key lacks the scope, or allow_hosts does not admit an address",
    404: "No such model or worker is registered, or there is no such reservation, response, decision or code",
    409: "It contradicts what is registered or reserved, or the limit of workers is reached",
    413: "The body exceeds the limit",
    415: "The body has a content coding that is not decoded, or a media type that is not the endpoint's",
    429: "All workers are saturated, and too many prompts wait; or registrations come too fast",
    502: "The engine that the router had to query does not answer",
    503: "No worker can take it, or the store does not answer",
    504: "The engine did not answer in time",
}

# The endpoints that FastAPI does not know: path, summary, body, reply, problems.
HOT_OPERATIONS: tuple[tuple[str, str, type, type, tuple[int, ...]], ...] = (
    (
        "/query",
        "How much of a prompt each worker would reuse, by token ids",
        queries.QueryBody,
        queries.QueryReply,
        (400, 404, 413),
    ),
    ("/query_by_hash", "The same, by block hashes", queries.QueryByHashBody, queries.QueryReply, (400, 404, 413)),
    (
        "/select",
        "The worker with the lowest cost, and why",
        choices.SelectBody,
        choices.SelectReply,
        (400, 404, 413, 503),
    ),
    (
        "/select_and_reserve",
        "The same, and its load counts until it is released or expires",
        choices.SelectBody,
        choices.SelectReply,
        (400, 404, 409, 413, 503),
    ),
)

PROXIED_NOTE = (
    "Body and answer keep their bytes: what else they may have is the engine's, and so are its own errors, whatever their "
    "status."
)
PROXIED_PROBLEMS = (400, 404, 413, 429, 502, 503, 504)

# The requests about a stored response, which are passed on to the worker that made it.
STORED_OPERATIONS = {
    ("GET", STORED_RESPONSE): "A stored response, or with `stream` its events after `starting_after`, by its worker",
    ("DELETE", STORED_RESPONSE): "Delete a stored response, at its worker",
    ("POST", f"{STORED_RESPONSE}/cancel"): "Cancel a response that is made in the background, at its worker",
    ("GET", f"{STORED_RESPONSE}/input_items"): "The input of a stored response, by its worker",
}
STORED_NOTE = (
    "Query, body and answer keep their bytes. A response that the client's key has not made gets the engines' 404, whose "
    "`code` is the number 404; one that is gone with its worker gets `response_owner_gone`."
)
STORED_PROBLEMS = (404, 502, 503, 504)


ENGINES_ANSWER: dict[str, Any] = {
    "description": "The engine's answer",
    "content": {JSON: {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}},
}

# The base URLs of our endpoints (`servers` in OpenAPI). Generated clients use the first one.
SERVERS = [
    {"url": VERSION, "description": "stable"},
    {"url": "/", "description": "the same, without a version"},
]

_MANY = {"type": "array", "items": {"type": "string"}}

EVENTS_OPERATION: dict[str, Any] = {
    "tags": ["watching"],
    "summary": "The fleet's events, as Server-Sent Events without an end",
    "operationId": "events",
    "parameters": [
        {"name": "model", "in": "query", "schema": _MANY, "description": "only events of these models"},
        {"name": "worker", "in": "query", "schema": _MANY, "description": "only events of these workers"},
        {
            "name": "type",
            "in": "query",
            "schema": {
                "type": "array",
                "items": {"type": "string", "enum": [event_type.value for event_type in EventType]},
            },
            "description": "only these events",
        },
        {"name": "hashes", "in": "query", "schema": {"type": "boolean"}, "description": "with the blocks' hashes"},
        {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}, "description": "goes on after it"},
    ],
    "responses": {
        "200": {"description": "Events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    },
}


def takes(kind: type) -> dict[str, Any]:
    """Return the request body of an operation, as FastAPI's `openapi_extra`."""
    return {"requestBody": {"required": True, "content": _content(kind)}}


def gives(kind: type, *problems: int, status: int = 200, many: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the answers of an operation, as FastAPI's `responses`.

    Answers 401 and 403 are added elsewhere if there is a key.

    Args:
        kind: The struct of the answer.
        problems: Statuses of `PROBLEMS`.
        status: The status of success.
        many: Whether the answer is a list of structs.
    """
    answers: dict[int | str, dict[str, Any]] = {status: {"description": "Done", "content": _content(kind, many=many)}}
    return answers | {status: _problem(status) for status in problems}


def _problem(status: int) -> dict[str, Any]:
    return {"description": PROBLEMS[status], "content": _content(errors.ErrorReply)}


def _content(kind: type, *, many: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"$ref": SCHEMA_REF.format(name=kind.__name__)}
    schema = {"schema": {"type": "array", "items": reference} if many else reference}
    return {JSON: dict(schema), MSGPACK: dict(schema)}


def document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document of FastAPI's routes and of the hot endpoints together."""
    openapi = app.openapi()
    for path, summary, body, reply, problems in HOT_OPERATIONS:
        responses = {str(code): answer for code, answer in gives(reply, *problems).items()}
        openapi["paths"][path] = {
            "post": {
                "tags": ["asking"],
                "summary": summary,
                "operationId": path[1:],
                "responses": responses,
                **takes(body),
            }
        }
    responses = EVENTS_OPERATION["responses"] | {str(status): _problem(status) for status in (400, 503)}
    openapi["paths"][EVENTS] = {"get": EVENTS_OPERATION | {"responses": responses}}
    for path, proxied in PROXIED.items():
        openapi["paths"][path] = {"post": _proxied(path, proxied.summary)}
    for (method, path), summary in STORED_OPERATIONS.items():
        openapi["paths"].setdefault(path, {})[method.lower()] = _stored(method, path, summary)
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            # FastAPI's own answer to a wrong parameter; the router answers 400 in its place.
            operation["responses"].pop("422", None)
            if "413" in operation["responses"]:
                # Every body is decoded and judged by its media type in one place (`http_api.py`).
                operation["responses"]["415"] = _problem(415)
            if any(parameter["in"] == "query" for parameter in operation.get("parameters", ())):
                # A parameter that is given twice is refused everywhere (`fastapi_app.py`).
                operation["responses"].setdefault("400", _problem(400))
            if len(app.state.paths.spellings(path)) > 1:
                operation["servers"] = SERVERS
            _illustrate(operation, EXAMPLES.get((method.upper(), path)))
    _, schemas = msgspec.json.schema_components(SCHEMAS, ref_template=SCHEMA_REF)
    components = openapi.setdefault("components", {})
    # FastAPI puts the choices of a parameter into a schema of their own, which is kept. Its other schemas describe its
    # own 422 answer and are dropped.
    choices = {name: schema for name, schema in components.get("schemas", {}).items() if "enum" in schema}
    components["schemas"] = schemas | choices
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"key": []}]
        for path, operations in openapi["paths"].items():
            for operation in operations.values():
                if path in ("/health", "/ready"):
                    operation["security"] = []
                else:
                    operation["responses"] |= {str(status): _problem(status) for status in (401, 403)}
    return openapi


def _proxied(path: str, summary: str) -> dict[str, Any]:
    model = msgspec.json.schema(fields.Model)
    body: dict[str, Any] = {"type": "object", "properties": {"model": model}}
    kind = JSON
    if path in AUDIO:
        kind = "multipart/form-data"
        body["properties"]["file"] = {"type": "string", "format": "binary", "description": "the recording"}
    return {
        "tags": ["OpenAI"],
        "summary": summary,
        "description": PROXIED_NOTE,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {kind: {"schema": body}}},
        "responses": {"200": ENGINES_ANSWER} | {str(status): _problem(status) for status in PROXIED_PROBLEMS},
    }


def _stored(method: str, path: str, summary: str) -> dict[str, Any]:
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [{"name": "response_id", "in": "path", "required": True, "schema": text}]
    return {
        "tags": ["OpenAI"],
        "summary": summary,
        "description": STORED_NOTE,
        "operationId": "_".join((method.lower(), *path.replace("/{response_id}", "").strip("/").split("/"))),
        "parameters": parameters,
        "responses": {"200": ENGINES_ANSWER} | {str(status): _problem(status) for status in STORED_PROBLEMS},
    }


def _illustrate(operation: dict[str, Any], body: Any) -> None:
    """Put an example into the body and the path of an operation."""
    if body is not None:
        operation["requestBody"]["content"][JSON]["example"] = body
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["description"], parameter["example"] = PATH_PARTS[parameter["name"]]


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-family:ui-monospace,monospace}td{padding:.2rem 1rem .2rem 0;vertical-align:top}"
    "details{margin:.3rem 0 1rem}pre{overflow:auto;background:#8881;padding:.6rem}"
)


def page(document: dict[str, Any]) -> str:
    """Return the document as an HTML page: every endpoint, and the schema of every body and answer."""
    rows = []
    for path, operations in sorted(document["paths"].items()):
        for method, operation in sorted(operations.items()):
            body = _link(operation.get("requestBody"))
            reply = _link(operation["responses"].get("200"))
            rows.append(
                f"<tr><td><code>{method.upper()} {escape(path)}</code></td>"
                f"<td>{escape(operation.get('summary', ''))}</td><td>{body}</td><td>{reply}</td></tr>"
            )
    schemas = []
    for name, schema in sorted(document["components"]["schemas"].items()):
        text = escape(msgspec.json.format(msgspec.json.encode(schema), indent=2).decode())
        schemas.append(f'<h3 id="{escape(name)}">{escape(name)}</h3><pre>{text}</pre>')
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>"
        f'<h1>{title}</h1><p>The same as <a href="openapi.json">OpenAPI</a>, for your client generator. Paths without a '
        f"version are also served below <code>{VERSION}</code>.</p>"
        f"<table><tr><td>endpoint</td><td>what it does</td><td>body</td><td>answer</td></tr>{''.join(rows)}</table>"
        f"<h2>Bodies and answers</h2>{''.join(schemas)}</body></html>"
    )


def _link(part: dict[str, Any] | None) -> str:
    schema = ((part or {}).get("content") or {}).get(JSON, {}).get("schema", {})
    name = escape(schema.get("$ref", "").rpartition("/")[2])
    return f'<a href="#{name}">{name}</a>' if name else ""
