# SPDX-License-Identifier: Apache-2.0
"""Comparison of the client's structs with the router's OpenAPI document: fields, types, and required fields.

Fields that only other clients use are left out, and listed here.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from kvrouter.client import answers, bodies, calls
from tests.contract.api_support import TinyCore, build, call

REF = "#/components/schemas/{name}"
# Fields of bodies that are left out: other names of the same fields, and Dynamo's form of a worker.
ALIASES = {
    "model_name",
    "modelname",
    "instance_id",
    "routing_group",
    "allowed_worker_ids",
    "isl_tokens",
    "expected_output_tokens",
    "session_context",
    "kv_events_endpoint",
    "kv_events_endpoints",
    "data_parallel_start_rank",
    "data_parallel_size",
}
# Fields of answers that are left out, because they are there for other clients.
FOR_OTHERS = {
    "QueryReply": {"frequencies"},
    "SelectReply": {"model_name", "routing_group", "isl_tokens", "block_size", "potential_decode_blocks"},
    "RegisteredReply": {"routing_group"},
}
# Fields that only the client has: their content becomes fields of the body.
OWN = {"SelectBody": {"extra"}}
# The router accepts either name of the id, so its schema requires neither.
STRICTER = {("RegisterBody", "worker_id"), ("UnregisterBody", "worker_id")}


def structs(module: Any) -> list[type]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return [kind for kind in kinds if kind is not msgspec.Struct and kind.__module__ == module.__name__]


BODIES, ANSWERS = structs(bodies), structs(answers)
_, CLIENT = msgspec.json.schema_components([*BODIES, *ANSWERS], ref_template=REF)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    parsed: dict[str, Any] = call(build(TinyCore())[0], "GET", "/openapi.json").json()
    return parsed


def types(schema: dict[str, Any], schemas: dict[str, Any]) -> frozenset[str]:
    """Return the types that a value may have.

    An enumeration of texts counts as a text, because a newer router may have more of them.
    """
    if "anyOf" in schema:
        return frozenset().union(*(types(part, schemas) for part in schema["anyOf"]))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return frozenset({"string" if "enum" in schemas[name] else name})
    kind = schema.get("type", "string" if "enum" in schema else "any")
    if kind == "array":
        places = schema.get("prefixItems") or [schema.get("items") or {}]
        return frozenset({f"array of {[sorted(types(part, schemas)) for part in places]}"})
    if kind == "object":
        values = schema.get("additionalProperties")
        return frozenset({f"object of {sorted(types(values, schemas)) if isinstance(values, dict) else 'any'}"})
    return frozenset({kind})


def same(name: str, field: str, router: dict[str, Any]) -> bool:
    """Return whether a field has the same type on both sides.

    Where the field may be absent, the client uses null for that.
    """
    ours = types(CLIENT[name]["properties"][field], CLIENT)
    theirs = types(router[name]["properties"][field], router)
    if field not in router[name].get("required", ()):
        ours, theirs = ours - {"null"}, theirs - {"null"}
    # A field of any type in the router's schema is one that the router decodes by itself.
    return ours == theirs or theirs == {"any"}


@pytest.mark.parametrize("kind", [*BODIES, *ANSWERS], ids=lambda kind: kind.__name__)
def test_a_struct_has_the_fields_and_types_of_the_document(kind: type, document: dict[str, Any]) -> None:
    name, router = kind.__name__, document["components"]["schemas"]
    assert name in router
    ours, theirs = set(CLIENT[name]["properties"]), set(router[name]["properties"])
    left_out = FOR_OTHERS.get(name, set()) | (ALIASES if kind in BODIES else set())
    assert ours - OWN.get(name, set()) == theirs - left_out
    assert FOR_OTHERS.get(name, set()) <= theirs
    wrong = [field for field in sorted(ours & theirs) if not same(name, field, router)]
    assert not wrong, {field: (CLIENT[name]["properties"][field], router[name]["properties"][field]) for field in wrong}


@pytest.mark.parametrize("kind", [*BODIES, *ANSWERS], ids=lambda kind: kind.__name__)
def test_what_a_struct_requires_the_document_requires(kind: type, document: dict[str, Any]) -> None:
    name = kind.__name__
    ours, theirs = (set(schemas[name].get("required", ())) for schemas in (CLIENT, document["components"]["schemas"]))
    stricter = {field for struct, field in STRICTER if struct == name}
    assert ours - stricter <= theirs
    # A body must also have every field that the router requires.
    assert kind not in BODIES or theirs <= ours


CALLS = [
    calls.query(bodies.QueryBody(token_ids=[1])),
    calls.query_by_hash(bodies.QueryByHashBody(block_hashes=[1])),
    calls.select(bodies.SelectBody()),
    calls.select_and_reserve(bodies.SelectBody()),
    calls.prefill_complete("s"),
    calls.release("s"),
    calls.workers(),
    calls.register(bodies.RegisterBody(worker_id="w")),
    calls.unregister(bodies.UnregisterBody(worker_id="w")),
    calls.health(),
]


@pytest.mark.parametrize("sent", CALLS, ids=lambda sent: f"{sent.method} {sent.route}")
def test_a_call_is_an_operation_of_the_document(sent: calls.Call[Any], document: dict[str, Any]) -> None:
    operation = document["paths"][sent.route][sent.method.lower()]
    assert operation["servers"][0]["url"] == calls.VERSION and sent.path.startswith(calls.VERSION)

    def named(part: dict[str, Any]) -> str:
        return str(part["content"]["application/json"]["schema"]["$ref"]).rpartition("/")[2]

    assert named(operation["responses"]["200"]) == sent.reply.__name__
    assert ("requestBody" in operation) == (sent.body is not None)
    if sent.body is not None:
        assert named(operation["requestBody"]) == type(sent.body).__name__


def test_every_call_is_listed_here() -> None:
    names = {
        name for name, value in vars(calls).items() if inspect.isfunction(value) and value.__module__ == calls.__name__
    }
    assert len(names - {"own_reservation", "is_gone"}) == len(CALLS)


def test_a_field_that_drifts_is_seen(document: dict[str, Any]) -> None:
    router = document["components"]["schemas"]
    changed = msgspec.json.decode(msgspec.json.encode(router))
    for name, field, other in (
        ("SelectReply", "dp_rank", {"type": "string"}),
        ("SelectReply", "endpoint", {"type": "string"}),
        ("QueryReply", "scores", {"type": "object", "additionalProperties": {"type": "integer"}}),
        ("HeldRuns", "runs", {"type": "array", "items": {"type": "integer"}}),
        ("SelectBody", "workers", {"type": "array", "items": {"type": "integer"}}),
    ):
        assert same(name, field, router)
        changed[name]["properties"][field] = other
        assert not same(name, field, changed)
