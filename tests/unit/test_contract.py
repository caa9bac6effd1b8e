# SPDX-License-Identifier: Apache-2.0
"""The contract has a description of each field, its page is current, and the client's calls are in the document.

`python -m tests.unit.test_contract` writes the tables of the page.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.client import SelectBody, calls
from kvrouter.contract import queries, registrations
from tests.contract.api_support import TinyCore, build, call
from tests.support.contract_tables import BEGIN, filled, structs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "http.md"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    parsed: dict[str, Any] = call(build(TinyCore())[0], "GET", "/openapi.json").json()
    return parsed


def test_every_field_has_a_description() -> None:
    _, schemas = msgspec.json.schema_components(list(structs().values()))
    fields = {(name, field): schemas[name]["properties"][field] for name in structs() for field in fields_of(name)}
    assert not [name for name, schema in fields.items() if not schema.get("description")]


def fields_of(name: str) -> tuple[str, ...]:
    return structs()[name].__struct_fields__


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (queries.ExplainedInstance, queries.InstanceReply),
        (registrations.DescribedReply, registrations.RegisteredReply),
    ],
    ids=["an explained instance", "a described registration"],
)
def test_a_struct_that_requires_more_fields_keeps_their_order(kind: Any, base: Any) -> None:
    assert kind.__struct_fields__ == base.__struct_fields__


def test_the_page_shows_every_body_and_answer_once() -> None:
    shown = " ".join(BEGIN.findall(PAGE.read_text())).split()
    assert sorted(shown) == sorted(structs())


def test_the_tables_of_the_page_are_current() -> None:
    page = PAGE.read_text()
    assert page == filled(page), "the contract has changed: run `make http-page`"


CALLS = [
    calls.query(queries.QueryBody(token_ids=[1])),
    calls.query_by_hash(queries.QueryByHashBody(block_hashes=[1])),
    calls.select(SelectBody()),
    calls.select_and_reserve(SelectBody()),
    calls.prefill_complete("s"),
    calls.release("s"),
    calls.workers(),
    calls.register(registrations.RegisterBody(worker_id="w")),
    calls.unregister(registrations.UnregisterBody(worker_id="w")),
    calls.health(),
]


@pytest.mark.parametrize("sent", CALLS, ids=lambda sent: f"{sent.method} {sent.route}")
def test_a_call_of_the_client_is_an_operation_of_the_document(sent: calls.Call[Any], document: dict[str, Any]) -> None:
    operation = document["paths"][sent.route][sent.method.lower()]
    assert operation["servers"][0]["url"] == calls.VERSION and sent.path.startswith(calls.VERSION)

    def named(part: dict[str, Any]) -> str:
        return str(part["content"]["application/json"]["schema"]["$ref"]).rpartition("/")[2]

    assert named(operation["responses"]["200"]) == sent.reply.__name__
    assert ("requestBody" in operation) == (sent.body is not None)
    if sent.body is not None:
        assert named(operation["requestBody"]) == type(sent.body).__name__


def test_every_call_of_the_client_is_listed_here() -> None:
    names = {
        name for name, value in vars(calls).items() if inspect.isfunction(value) and value.__module__ == calls.__name__
    }
    assert len(names - {"own_reservation", "is_gone"}) == len(CALLS)


def test_an_absent_field_is_none_for_the_client() -> None:
    sparse = queries.InstanceReply(longest_matched=0, gpu=0, cpu=0, disk=0, dp={}, state="live")
    assert b"reason" not in msgspec.json.encode(sparse)
    assert msgspec.json.decode(msgspec.json.encode(sparse), type=queries.InstanceReply).reason is None


def test_null_is_sent_where_an_explained_hit_has_no_limit() -> None:
    explained = queries.ExplainedInstance(
        longest_matched=0, gpu=0, cpu=0, disk=0, dp={}, state="live", groups=(), limited_by=None
    )
    assert b'"groups":[],"limited_by":null' in msgspec.json.encode(explained)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    sys.exit()
