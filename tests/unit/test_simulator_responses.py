# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` of a replica, from its creation to its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
import zmq

from kvrouter.simulator.cache.shapes import gpt_oss
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.json_http import call, refusal


@pytest.fixture
def url() -> Iterator[str]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        server = ReplicaServer(gpt_oss(16, 64), 400, context=context, model="m")
        thread = ServerThread([server])
        thread.start()
        yield server.endpoints["url"]
        thread.stop()


def create(url: str, text: str = "hello there", **more: Any) -> Any:
    return call(f"{url}/v1/responses", {"model": "m", "input": text, "max_output_tokens": 4, **more})


def stored(url: str, response_id: str, method: str = "GET", below: str = "") -> Any:
    request = Request(f"{url}/v1/responses/{response_id}{below}", method=method)
    with urlopen(request) as answer:
        return json.load(answer)


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


def stream(url: str, path: str, body: Any = None) -> list[dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url + path, data=data, headers={"content-type": "application/json"})) as answer:
        return events(answer.read())


def test_a_stored_response_is_retrieved_with_its_input_until_it_is_deleted(url: str) -> None:
    made = create(url)
    assert made["status"] == "incomplete" and made["output"][0]["content"][0]["text"]
    assert stored(url, made["id"]) == made
    assert stored(url, made["id"], below="/input_items")["data"][0]["content"][0]["text"] == "hello there"
    assert stored(url, made["id"], "DELETE")["deleted"]
    status, error = refusal(f"{url}/v1/responses/{made['id']}", None)
    assert status == 404
    assert error == {
        "message": f"Response with id '{made['id']}' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": 404,
    }


def test_the_next_turn_has_the_whole_conversation_in_its_prompt_and_reuses_it(url: str) -> None:
    first = create(url, "word " * 60)
    second = create(url, "and then?", previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] // 16 * 16 - 16


def test_an_unknown_or_unstored_response_is_not_found_as_the_previous_one(url: str) -> None:
    unstored = create(url, store=False)["id"]
    for missing in ("resp_unknown", unstored, ""):
        body = {"model": "m", "input": "a", "previous_response_id": missing}
        assert refusal(f"{url}/v1/responses", body)[0] == 404


def test_a_stream_names_its_response_first_and_ends_with_its_usage(url: str) -> None:
    got = stream(url, "/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 3, "stream": True})
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    assert got[0]["type"] == "response.created" and got[-1]["type"] == "response.incomplete"
    assert got[-1]["response"]["usage"]["output_tokens"] == 3
    assert stored(url, got[0]["response"]["id"])["status"] == "incomplete"


def test_a_background_stream_resumes_where_it_was_left(url: str) -> None:
    body = {"model": "m", "input": "a", "max_output_tokens": 3, "stream": True, "background": True}
    whole = stream(url, "/v1/responses", body)
    response_id = whole[0]["response"]["id"]
    assert stream(url, f"/v1/responses/{response_id}?stream=true&starting_after=4") == whole[5:]


def test_a_background_response_is_cancelled_and_stays_retrievable(url: str) -> None:
    call(f"{url}/sim/faults", {"stall_s": 600})
    made = create(url, background=True)
    assert made["status"] == "queued"
    assert stored(url, made["id"], "POST", "/cancel")["status"] == "cancelled"
    assert stored(url, made["id"])["status"] == "cancelled"


def test_a_restarted_replica_has_lost_its_responses(url: str) -> None:
    made = create(url)
    call(f"{url}/sim/faults", {"restart": True})
    assert refusal(f"{url}/v1/responses/{made['id']}", None)[0] == 404
