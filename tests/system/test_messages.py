# SPDX-License-Identifier: Apache-2.0
"""Anthropic's own client through `kvrouter serve` to simulated replicas, with scores and rerank beside it.

Streams, tools, token counts and errors pass, and the predicted hit is the number of tokens that the replica reports as
read from its cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.fleet import rows, settle, until, wait_live
from tests.support.replica_process import MODEL, STOP_S, replicas, worker_flags
from tests.support.router_process import RouterProcess

# A text of some blocks of the shape.
SYSTEM = [{"type": "text", "text": "You are brief." + " bada bede" * 200, "cache_control": {"type": "ephemeral"}}]
TOOL = {"name": "weather", "description": "The weather in a city", "input_schema": {"properties": {"city": {}}}}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with (
        replicas(2, "--shape", "gemma3", "--blocks", "2000", "--instant") as endpoints,
        RouterProcess(tmp_path_factory.mktemp("router"), worker_flags(endpoints)) as started,
    ):
        with client_of(started) as client:
            for number in range(2):
                ask(client, f"hello {number}", extra_headers={"x-kvrouter-worker": f"w{number}"})
        wait_live(started)
        yield started


def client_of(router: RouterProcess) -> Any:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{router.port}", api_key="x", max_retries=0, timeout=STOP_S)


def ask(client: Any, content: Any, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": content}])
    return client.messages.with_raw_response.create(model=MODEL, max_tokens=8, system=SYSTEM, messages=messages, **more)


def predicted(answer: Any) -> int | None:
    header = answer.headers.get("x-kvrouter-predicted-hit")
    return None if header is None else int(header)


def test_a_conversation_with_tools_is_predicted_exactly(router: RouterProcess) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    reused = 0
    with client_of(router) as client:
        for number in range(6):
            settle(router)
            answer = ask(client, None, messages=turns, tools=[TOOL])
            message = answer.parse()
            assert predicted(answer) == message.usage.cache_read_input_tokens
            reused += message.usage.cache_read_input_tokens
            counted = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=turns, tools=[TOOL])
            assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
            call = {"type": "tool_use", "id": f"call_{number}", "name": "weather", "input": {"city": "Paris"}}
            result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": "21 degrees"}
            text_blocks = [block.model_dump(include={"type", "text"}) for block in message.content]
            turns += [{"role": "assistant", "content": [*text_blocks, call]}, {"role": "user", "content": [result]}]
    assert reused > 1_000


def test_a_stream_has_the_clients_events_and_its_usage_is_read(router: RouterProcess) -> None:
    before = total = delivered(router)
    with client_of(router) as client:
        for _ in range(2):
            settle(router)
            with client.messages.stream(
                model=MODEL, max_tokens=8, system=SYSTEM, messages=[{"role": "user", "content": "Count."}]
            ) as stream:
                predicted_hit = int(stream.response.headers["x-kvrouter-predicted-hit"])
                kinds = {event.type for event in stream}
                final = stream.get_final_message()
            assert {"message_start", "content_block_delta", "message_delta", "message_stop"} <= kinds
            assert final.usage.cache_read_input_tokens == predicted_hit and final.usage.output_tokens == 8
            total += predicted_hit
    assert total > before
    until(lambda: delivered(router) == total, "quality has read the usage")


def delivered(router: RouterProcess) -> int:
    return sum(row["reuse"]["delivered_tokens"] for row in rows(router).values() if row["reuse"])


def test_errors_have_the_shape_that_the_client_reads(router: RouterProcess) -> None:
    with client_of(router) as client:
        with pytest.raises(anthropic.NotFoundError, match="unknown_model"):
            client.messages.create(model="nobody", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model=MODEL, max_tokens=0, messages=[{"role": "user", "content": "x"}])


def test_what_only_the_engine_reads_is_placed_blind_and_passes(router: RouterProcess) -> None:
    with client_of(router) as client:
        answer = ask(client, "x", thinking={"type": "disabled"}, extra_headers={"x-request-id": "blind-1"})
        assert predicted(answer) is None and answer.parse().usage.output_tokens == 8
    assert router.request("GET", "/decisions/blind-1")["proof"] == "unknown"


def test_scores_and_rerank_pass_with_session_and_pin(router: RouterProcess) -> None:
    url = f"http://127.0.0.1:{router.port}"
    body = {"model": MODEL, "query": "a b", "documents": ["c d", "a b", "a c"], "top_n": 2}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = httpx.post(url + path, json=body, headers={"x-kvrouter-worker": "w1", "x-request-id": path[1:]})
        assert answer.headers["x-kvrouter-worker"] == "w1" and "x-kvrouter-predicted-hit" not in answer.headers
        assert [result["index"] for result in answer.json()["results"]] == [1, 2]
    places = set()
    for path in ("/score", "/v1/score") * 3:
        body = {"model": MODEL, "text_1": "a b", "text_2": ["a b", "c"]}
        answer = httpx.post(url + path, json=body, headers={"x-session-id": "s", "x-request-id": "scored"})
        assert [entry["score"] for entry in answer.json()["data"]] == [1.0, 0.0]
        places.add(answer.headers["x-kvrouter-worker"])
    assert len(places) == 1
    decision = router.request("GET", "/decisions/scored")
    assert (decision["proof"], decision["session_id"], decision["outcome"]["outcome"]) == ("unknown", "s", "ok")
