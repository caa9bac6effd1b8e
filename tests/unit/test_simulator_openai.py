# SPDX-License-Identifier: Apache-2.0
"""A replica's OpenAI side over real HTTP: texts, chats, streams, aborts, what /metrics reports, and the faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import zmq

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.peer import Lender
from kvrouter.simulator.cache.shapes import gpt_oss
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.peer_source import wish_of
from kvrouter.simulator.http.server import ReplicaServer

PATIENCE_S = 20.0

# The timing is slow enough that a request is still under way when the test acts on it.
SLOW = Timing(1e6, 0.05, 0.0)


class Client:
    """One replica and an HTTP session with it."""

    def __init__(self, server: ReplicaServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        async with self.session.post(path, json=body) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json()

    async def complete(self, prompt: str | list[int], **more: Any) -> Any:
        return await self.post("/v1/completions", {"prompt": prompt, **more})

    async def chat(self, messages: list[dict[str, Any]], **more: Any) -> Any:
        return await self.post("/v1/chat/completions", {"messages": messages, **more})

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Stream a request, and return its chunks without the last line, which must be [DONE]."""
        async with self.session.post(path, json={**body, "stream": True}) as reply:
            assert (reply.status, reply.content_type) == (200, "text/event-stream")
            events = (await reply.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def metrics(self) -> dict[str, float]:
        async with self.session.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return {
            line.split("{")[0].split(" ")[0]: float(line.split(" ")[-1]) for line in lines if not line.startswith("#")
        }

    async def until(self, is_so: Callable[[dict[str, float]], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not is_so(metrics := await self.metrics()):
            assert asyncio.get_running_loop().time() < deadline, metrics
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replica(*, timing: Timing = INSTANT, blocks: int = 400, **more: Any) -> AsyncIterator[Client]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        server = ReplicaServer(gpt_oss(16, 32), blocks, context=context, model="m", timing=timing, **more)
        await server.open()
        try:
            async with aiohttp.ClientSession(server.endpoints["url"]) as session:
                yield Client(server, session)
        finally:
            await server.close()


@pytest.fixture
def client() -> AbstractAsyncContextManager[Client]:
    return replica()


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a block pool? " * 5}]


async def test_a_text_is_its_tokens(client: Client) -> None:
    text = "Once upon a time, in a pool of blocks, there was a free queue." * 3
    answer = await client.complete(text, max_tokens=5)
    tokens = tokenizer.encode(text)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    again = await client.complete(tokens, max_tokens=5)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [[[1, 2, 3]], [1, 2, 3], ["abc"], "abc"])
async def test_a_prompt_may_be_a_list_of_one(prompt: Any, client: Client) -> None:
    assert (await client.complete(prompt))["usage"]["prompt_tokens"] == 3


async def test_a_stream_says_what_the_whole_answer_says(client: Client) -> None:
    body = {"prompt": "tell me " * 20, "max_tokens": 9, "return_token_ids": True}
    whole_answer = await client.post("/v1/completions", body)
    chunks = await client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *pieces, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == whole_answer["choices"][0]["text"]
    assert [chunk["choices"][0]["token_ids"][0] for chunk in pieces] == whole_answer["choices"][0]["token_ids"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in pieces] == [None] * 8 + ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_chat_streams_deltas_and_continues_where_it_ended(client: Client) -> None:
    first, *pieces = await client.stream("/v1/chat/completions", {"messages": CHAT, "max_tokens": 40})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in pieces} == {"chat.completion.chunk"}
    answer_text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces)
    more = [*CHAT, {"role": "assistant", "content": answer_text}, {"role": "user", "content": "Go on."}]
    answer = await client.chat(more, max_tokens=3)
    usage = answer["usage"]
    # The answer went back as text and has the tokens with which it was sampled, so all of it but the last block is
    # known.
    first_turn = len(tokenizer.encode(tokenizer.render_chat(CHAT))) + 40
    again = await client.chat(more, max_tokens=3)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first_turn // 16 * 16
    assert usage["prompt_tokens"] > first_turn
    assert answer["choices"][0]["message"]["role"] == "assistant"


async def test_a_chat_without_a_limit_comes_to_an_end(client: Client) -> None:
    (choice,) = (await client.chat(CHAT))["choices"]
    assert choice["finish_reason"] == "stop"


async def test_tokenize_gives_the_tokens_of_a_chat(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    tokenized = await client.post("/tokenize", {"messages": CHAT, "tools": tools, "return_token_strs": True})
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert "".join(tokenized["token_strs"]).endswith("<|im_start|>assistant\n")
    used = await client.chat(CHAT, tools=tools, max_tokens=1)
    assert used["usage"]["prompt_tokens"] == tokenized["count"]
    plain = await client.post("/tokenize", {"prompt": "déjà vu bada"})
    assert await client.post("/detokenize", {"tokens": plain["tokens"]}) == {"prompt": "déjà vu bada"}
    assert plain["max_model_len"] == client.server.replica.max_text_tokens


async def test_requests_run_together_and_metrics_count_them() -> None:
    async with replica(timing=SLOW, max_running=3) as client:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.complete([n] * 40, max_tokens=6)) for n in range(5)]
            await client.until(lambda found: found["vllm:num_requests_running"] == 3)
            metrics = await client.metrics()
            assert metrics["vllm:num_requests_waiting"] == 2
            assert 0 < metrics["vllm:kv_cache_usage_perc"] < 1
        assert all(task.result()["usage"]["completion_tokens"] == 6 for task in tasks)
        metrics = await client.metrics()
        assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
        assert metrics["vllm:prefix_cache_queries_total"] == 200
        assert metrics["vllm:generation_tokens_total"] == 30
        assert metrics["process_start_time_seconds"] == client.server.api.life.started_s


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    async with replica(timing=SLOW, blocks=1000) as client:
        body = {"prompt": list(range(100)), "max_tokens": 5000, "stream": stream}
        request = asyncio.create_task(client.session.post("/v1/completions", json=body))
        await client.until(lambda found: found["vllm:num_requests_running"] == 1)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await client.until(lambda found: found["vllm:num_requests_running"] == 0)
        assert client.server.replica.pool.num_free == 999


async def test_a_stalled_replica_answers_http_and_nothing_else(client: Client) -> None:
    await client.post("/sim/faults", {"stall_s": 3600})
    request = asyncio.create_task(client.complete([1, 2, 3]))
    await client.until(lambda found: found["vllm:num_requests_running"] == 1)
    assert not request.done()
    request.cancel()


async def test_ordered_failures_are_answered_and_counted_down(client: Client) -> None:
    await client.post("/sim/faults", {"fail": 2, "fail_status": 503, "unhealthy": True})
    for _ in range(2):
        await client.post("/v1/completions", {"prompt": [1]}, 503)
    await client.complete([1])
    async with client.session.get("/health") as reply:
        assert reply.status == 503
    await client.post("/sim/faults", {"fial": 1}, 400)


async def test_a_replica_with_keys_refuses_what_vllm_refuses(client: Client) -> None:
    await client.post("/sim/faults", {"api_keys": ["old", "new"]})
    await client.post("/v1/completions", {"prompt": [1]}, 401)
    for key, status in (("old", 200), ("new", 200), ("newer", 401)):
        async with client.session.get("/v1/models", headers={"authorization": f"Bearer {key}"}) as reply:
            assert reply.status == status
    # Only paths below /v1 are guarded.
    async with client.session.get("/health") as reply:
        assert reply.status == 200
    await client.post("/sim/faults", {"api_keys": []})
    await client.complete([1])


async def test_a_restart_is_a_new_life(client: Client) -> None:
    prompt = list(range(64))
    await client.complete(prompt)
    assert client.server.publisher.next_seq > 0
    began = (await client.metrics())["process_start_time_seconds"]
    await client.post("/sim/faults", {"stall_s": 3600})
    request = asyncio.create_task(client.complete(prompt, max_tokens=50))
    await client.until(lambda found: found["vllm:num_requests_running"] == 1)
    await client.post("/sim/faults", {"restart": True})
    with pytest.raises(aiohttp.ClientError):
        await request
    assert client.server.publisher.next_seq == 0
    assert (await client.metrics())["process_start_time_seconds"] > began
    assert (await client.complete(prompt))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_prompt_is_handed_over_from_prefill_to_decode(client: Client) -> None:
    prompt = list(range(100))
    first = await client.complete(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] and len(params["remote_block_ids"]) == 2
    async with replica() as decoder:
        second = await decoder.complete(prompt, max_tokens=5, kv_transfer_params=params)
    # As in vLLM, usage reports the blocks of the prefill replica; only the last token was computed here.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "kv_transfer_params" not in second
    whole_answer = await client.complete(prompt, max_tokens=5)
    assert second["choices"][0]["text"] == whole_answer["choices"][0]["text"]
    assert whole_answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    incomplete = {"do_remote_prefill": True}
    local = await client.complete(list(range(500, 600)), kv_transfer_params=incomplete)
    assert local["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_cpu_tier_is_used_over_http() -> None:
    async with replica(blocks=40, cpu_chunks=200) as client:
        prompt = list(range(200))
        await client.complete(prompt)
        for n in range(4):
            await client.complete(list(range(1000 * n + 1000, 1000 * n + 1200)))
        assert client.server.replica.find(prompt).tokens == 0
        assert (await client.complete(prompt))["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


async def test_lost_batches_leave_a_gap_in_the_numbers(client: Client) -> None:
    await client.post("/sim/faults", {"lose_events": 1})
    await client.complete(list(range(64)), max_tokens=1)
    await client.complete(list(range(100, 164)), max_tokens=1)
    assert client.server.publisher.next_seq == 2
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 10_000
        assert client.server.endpoints["replay"] is not None
        dealer.connect(client.server.endpoints["replay"])
        client.server.publisher.flush(PATIENCE_S)
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        assert int.from_bytes(dealer.recv_multipart()[2], "big") == 1


async def test_a_replica_fetches_from_another_one_of_its_process_that_a_request_names_by_its_port() -> None:
    lenders: dict[int, Callable[[], Lender | None]] = {}
    prompt = list(range(100))
    async with replica(cpu_chunks=40, lenders=lenders) as source, replica(cpu_chunks=40, lenders=lenders) as reader:
        await source.complete(prompt)
        port = int(source.server.endpoints["url"].rpartition(":")[2])

        async def cached(value: Any) -> int:
            answer = await reader.complete(prompt, kv_transfer_params={"remote_kv_source": value})
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        for value in (
            None,
            "there",
            {},
            {"remote_port": "x"},
            {"remote_port": 1},
            {"remote_port": port, "timeout_s": 0},
        ):
            assert wish_of({"remote_kv_source": value}, lenders) is None
        assert await cached({"kv_request_id": "a", "remote_host": "127.0.0.1", "remote_port": port}) == 96
