# SPDX-License-Identifier: Apache-2.0
"""A replica over its sockets: HTTP, the live stream and the replay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.pool import Key
from kvrouter.simulator.cache.shapes import gpt_oss
from kvrouter.simulator.command import main
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.json_http import call, refusal

PATIENCE_S = 20.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        yield context


@pytest.fixture
def server(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[ReplicaServer]:
    server = ReplicaServer(gpt_oss(16, 32), 40, context=context, model="m", clock=lambda: 1234.5)
    thread = ServerThread([server])
    thread.start()
    yield server
    thread.stop()


def complete(server: ReplicaServer, tokens: list[Any], **more: Any) -> Any:
    return call(f"{server.endpoints['url']}/v1/completions", {"prompt": tokens, "model": "m", **more})


def replayed(server: ReplicaServer, context: zmq.Context[zmq.Socket[bytes]], count: int) -> list[tuple[int, bytes]]:
    """Return all batches of the replay, once there are `count`: the publisher's thread may be late."""
    deadline_s = time.monotonic() + PATIENCE_S
    while len(batches := replay(server, context)) < count:
        assert time.monotonic() < deadline_s, f"{len(batches)} of {count} batches"
        time.sleep(0.01)
    return batches


def replay(server: ReplicaServer, context: zmq.Context[zmq.Socket[bytes]]) -> list[tuple[int, bytes]]:
    assert server.endpoints["replay"] is not None
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 10_000
        dealer.connect(server.endpoints["replay"])
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        batches: list[tuple[int, bytes]] = []
        while True:
            _, _, seq, payload = dealer.recv_multipart()
            if seq == b"\xff" * 8:
                return batches
            batches.append((int.from_bytes(seq, "big"), payload))


def test_usage_tells_what_was_reused(server: ReplicaServer) -> None:
    first = complete(server, list(range(50)), max_tokens=3)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    again = complete(server, list(range(50)), max_tokens=3, return_token_ids=True)
    assert again["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": 3,
        "total_tokens": 53,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    (choice,) = again["choices"]
    assert choice["text"] == tokenizer.decode(choice["token_ids"]) == first["choices"][0]["text"]
    assert "token_ids" not in first["choices"][0]


def test_the_salt_separates_prompts(server: ReplicaServer) -> None:
    complete(server, list(range(50)))
    assert complete(server, list(range(50)), cache_salt="a")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"prompt": ["two", [1]]}, 400, "one kind"),
        ({"prompt": [-1]}, 400, ">= 0"),
        ({"prompt": []}, 400, "non-empty"),
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [1], "model": "other"}, 404, "serves `m`"),
        ({"prompt": [1], "n": 0}, 400, "$.n"),
        ({"prompt": list(range(2000))}, 400, "shorter prompt"),
    ],
)
def test_unsupported_fields_are_refused_as_openai_refuses_them(
    server: ReplicaServer, body: dict[str, Any], status: int, part: str
) -> None:
    code, error = refusal(f"{server.endpoints['url']}/v1/completions", body)
    assert code == status
    assert part in error["message"]
    assert error["type"] and error["code"]


def test_the_usage_of_a_list_has_the_sum_of_its_prompts_and_the_reuse_of_the_last(server: ReplicaServer) -> None:
    held, unknown = list(range(100)), list(range(5_000, 5_040))
    complete(server, held)
    cached = complete(server, held)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    for prompts, reused in (([unknown, held], cached), ([held, list(range(6_000, 6_040))], 0)):
        answer = complete(server, prompts, max_tokens=3)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (140, 6, 146)
        assert usage["prompt_tokens_details"]["cached_tokens"] == reused


def test_each_prompt_gets_as_many_answers_as_it_wants(server: ReplicaServer) -> None:
    answer = complete(server, [[1, 2, 3], [4, 5]], max_tokens=3, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 12)


def test_models_and_health_are_served(server: ReplicaServer) -> None:
    assert call(f"{server.endpoints['url']}/health") is None
    (card,) = call(f"{server.endpoints['url']}/v1/models")["data"]
    assert card["id"] == "m"


def test_the_stream_says_what_the_pool_holds(server: ReplicaServer, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    for n in range(6):
        complete(server, [*range(60), *range(n * 1000, n * 1000 + 80)], cache_salt="a" if n == 3 else None)
    batches = replayed(server, context, server.publisher.next_seq)
    assert [seq for seq, _ in batches] == list(range(server.publisher.next_seq))
    copies: dict[tuple[int | None, int], int] = {}
    decoder = BatchDecoder()
    removed = 0
    for _, payload in batches:
        batch = decoder.decode(payload, with_tokens=True)
        assert (batch.ts, batch.dp_rank, batch.broken, batch.unknown) == (1234.5, 0, [], 0)
        for event in batch.events:
            assert not isinstance(event, AllBlocksCleared)
            assert event.medium == "GPU"
            change = -1 if isinstance(event, BlockRemoved) else 1
            removed += change < 0
            if isinstance(event, BlockStored):
                assert (event.kind, event.sliding_window) == [("sliding_window", 32), ("full_attention", None)][
                    event.group_idx or 0
                ]
                assert event.token_ids is not None
                assert len(event.token_ids) % 16 == 0
            for block_hash in event.block_hashes.tolist():
                place = (event.group_idx, block_hash)
                copies[place] = copies.get(place, 0) + change
    assert removed
    resident = server.replica.pool.resident()
    expected = {(key.group_idx, int.from_bytes(key.block_hash[-8:], "big")): n for key, n in resident.items()}
    assert {place: n for place, n in copies.items() if n} == expected
    assert isinstance(next(iter(resident)), Key)


def test_a_reset_shows_with_the_next_request(server: ReplicaServer, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    complete(server, list(range(50)))
    seq_before = server.publisher.next_seq
    assert call(f"{server.endpoints['url']}/reset_prefix_cache", {}) == {"success": True}
    assert server.publisher.next_seq == seq_before
    assert complete(server, list(range(50)))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    batch = BatchDecoder().decode(replayed(server, context, seq_before + 1)[seq_before][1])
    assert isinstance(batch.events[0], AllBlocksCleared)


def test_stop_frees_the_port(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server = ReplicaServer(gpt_oss(16, 32), 40, context=context, model="m")
    server.release()
    port = int(server.endpoints["url"].rpartition(":")[2])
    again = ReplicaServer(gpt_oss(16, 32), 40, context=context, model="m", port=port)
    thread = ServerThread([again])
    thread.start()
    assert call(f"{again.endpoints['url']}/health") is None
    thread.stop()
    thread.stop()


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--shape", "llama", "--window", "64"], "no sliding-window group"),
        (["--retention", "7"], "no multiple"),
        (["--retention", "some"], "some"),
        (["--blocks", "1"], "at least one more"),
        (["--events", "nowhere"], "nvalid argument"),
        (["--replicas", "0"], "1 or more"),
        (["--replicas", "2", "--events", "tcp://127.0.0.1:5557"], "leave them out"),
        (["--prefill-rate", "0"], "above 0"),
        (["--cpu-chunks", "-3"], "room for"),
        (["--slow", "0"], "slow"),
    ],
)
def test_wrong_settings_end_with_one_line(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert part in output.err
