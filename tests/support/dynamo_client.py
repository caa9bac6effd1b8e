# SPDX-License-Identifier: Apache-2.0
"""A client of Dynamo's selection service and of its indexer, independent of this project's code.

It has Dynamo's names and types. Answers are decoded into structs like Dynamo's own: a field of another type is an
error, an additional field is not. `drive_selection` and `drive_indexer` make every request that such a client makes;
both run against Dynamo's services and against ours. Source: ai-dynamo-runtime 1.6.1.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

BLOCK = 16
MODEL = "m"
# The largest worker id that Dynamo's clients can send.
LARGEST_ID = 2**64 - 1
URLS = ("http://127.0.0.1:9001", "http://127.0.0.1:9002")
VISIBLE_TIMEOUT_S = 30.0


class Overlap(msgspec.Struct):
    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class Worker(msgspec.Struct):
    worker_id: int
    model_name: str
    routing_group: str
    lifecycle: str
    endpoint: str | None
    kv_events_endpoint: str | None
    replay_endpoint: str | None
    block_size: int | None


class Selected(msgspec.Struct):
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    potential_decode_blocks: int
    selection_id: str | None = None
    isl_tokens: int | None = None


class Reserved(msgspec.Struct):
    selection_id: str
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str


class Load(msgspec.Struct):
    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class ModelLoads(msgspec.Struct):
    model_name: str
    routing_group: str
    loads: list[Load]
    pending_count: int
    pending_isl_tokens: int


class Done(msgspec.Struct):
    status: str


class Ready(msgspec.Struct):
    ready: bool
    schedulable_workers: int


class Scores(msgspec.Struct):
    scores: dict[str, dict[str, int]]
    frequencies: list[int]
    instances: dict[str, Overlap]


class Exchange(msgspec.Struct):
    """One request and its answer."""

    name: str
    method: str
    path: str
    body: Any
    status: int
    answer: Any


class Client:
    """An HTTP client that records every request and answer in `exchanges`."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=VISIBLE_TIMEOUT_S)
        self.exchanges: list[Exchange] = []

    def close(self) -> None:
        self._connection.close()

    def ask(self, name: str, method: str, path: str, body: Any = None, *, wants: Any = None) -> Any:
        """Send a request and return its answer, decoded as `wants`.

        If `wants` is None, the answer must be a refusal (status 400 or above), and None is returned.
        """
        payload = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json", "accept": "*/*", "user-agent": "dynamo", "x-trace-id": "t1"}
        self._connection.request(method, path, payload, headers)
        response = self._connection.getresponse()
        raw = response.read()
        answer = json.loads(raw) if raw.startswith((b"{", b"[")) else raw.decode()
        self.exchanges.append(Exchange(name, method, path, body, response.status, answer))
        if wants is None:
            assert response.status >= 400, (path, response.status, raw[:300])
            return None
        assert response.status < 300, (path, response.status, raw[:300])
        return msgspec.json.decode(raw, type=wants)


def until(reached: Callable[[], bool], client: Client) -> None:
    """Call `reached` until it is true, and keep only the last of the exchanges that it made."""
    deadline = time.monotonic() + VISIBLE_TIMEOUT_S
    kept = len(client.exchanges)
    while not reached():
        assert time.monotonic() < deadline, client.exchanges[-1]
        del client.exchanges[kept:]
        time.sleep(0.02)
    del client.exchanges[kept:-1]


def worker_body(worker_id: int, url: str, events: str, replay: str | None) -> dict[str, Any]:
    """Return a worker's registration with all optional fields present, as Dynamo's own clients send it."""
    return {
        "worker_id": worker_id,
        "model_name": MODEL,
        "routing_group": "default",
        "endpoint": url,
        "kv_events_endpoint": events,
        "kv_events_endpoints": {},
        "replay_endpoint": replay,
        "block_size": BLOCK,
        "data_parallel_start_rank": None,
        "data_parallel_size": None,
        "max_num_batched_tokens": None,
        "total_kv_blocks": None,
        "stable_routing_id": None,
        "taints": [],
        "topology_domains": {},
    }


def drive_selection(
    client: Client, streams: Sequence[tuple[str, str]], publish: Callable[[], object], tokens: list[int]
) -> None:
    """Make every request of a client of the selection service, and check the answers.

    Args:
        client: The client of the service under test.
        streams: The events and replay endpoints of two engines.
        publish: Publishes once both engines are subscribed to: the first one stores 12 blocks of `tokens`, the second
            one 3.
        tokens: The prompt of all selections.
    """
    first, second = 1, LARGEST_ID
    client.ask("not ready", "GET", "/ready")
    for worker_id, url, (events, replay) in zip((first, second), URLS, streams, strict=True):
        added = client.ask("register", "POST", "/workers", worker_body(worker_id, url, events, replay), wants=Worker)
        assert (added.worker_id, added.endpoint, added.kv_events_endpoint) == (worker_id, url, events)
        assert added.lifecycle == "schedulable"
    until(lambda: bool(client.ask("ready", "GET", "/ready", wants=Ready).schedulable_workers == 2), client)
    publish()
    question = {
        "model_name": MODEL,
        "routing_group": "default",
        "token_ids": tokens,
        "lora_name": None,
        "cache_salt": None,
    }

    def chosen(worker_id: int, **more: Any) -> Selected:
        selected: Selected = client.ask("select", "POST", "/select", question | more, wants=Selected)
        assert more.get("pinned_worker") is None or selected.worker_id == worker_id
        return selected

    until(lambda: chosen(first).overlap.longest_matched == 192, client)
    until(
        lambda: (
            chosen(second, pinned_worker={"worker_id": second, "dp_rank": 0}).overlap
            == Overlap(48, 48, {"0": 48}, 48, 48)
        ),
        client,
    )
    more = {
        "selection_id": "s1", "expected_output_tokens": 32, "allowed_worker_ids": [first, second], "router_config_override": None,
        "priority_jump": None, "strict_priority": None, "session_id": None, "session_context": {"session_id": "talk"},
        "affinity_target": None, "pinned_worker": None, "routing_constraints": {},
    }  # fmt: skip
    selected = client.ask("select with an id", "POST", "/select", question | more, wants=Selected)
    assert (selected.selection_id, selected.worker_id, selected.endpoint) == ("s1", first, URLS[0])
    assert selected.overlap == Overlap(192, 192, {"0": 192}, 192, 192) and selected.effective_prefill_tokens == 8

    booking = {"model_name": MODEL, "routing_group": "default", "selection_id": "s1"}
    reserved = client.ask("claim", "POST", "/reservations", booking, wants=Reserved)
    assert (reserved.selection_id, reserved.worker_id, reserved.endpoint) == ("s1", first, URLS[0])
    client.ask("claim twice", "POST", "/reservations", booking)
    client.ask("claim what never was", "POST", "/reservations", booking | {"selection_id": "never"})

    def load_of(worker_id: int) -> Load:
        (entry,) = client.ask("loads", "GET", f"/loads?model_name={MODEL}", wants=list[ModelLoads])
        return next(load for load in entry.loads if load.worker_id == worker_id)

    load = load_of(first)
    assert (load.potential_prefill_tokens, load.active_requests) == (8, 1) and load.potential_decode_blocks > 0
    assert load_of(second).active_requests == 0
    assert client.ask("loads of no model", "GET", "/loads?model_name=none", wants=list[ModelLoads]) == []

    for _ in range(2):
        client.ask("prefill complete", "POST", "/reservations/s1/prefill_complete", wants=Done)
    client.ask("output block", "POST", "/reservations/s1/output_block", {"decay_fraction": 0.5}, wants=Done)
    load = load_of(first)
    assert (load.potential_prefill_tokens, load.active_requests) == (0, 1)
    assert client.ask("release", "DELETE", "/reservations/s1", wants=Done).status == "ok"
    client.ask("release twice", "DELETE", "/reservations/s1")
    client.ask("prefill complete of nothing", "POST", "/reservations/s1/prefill_complete")

    both = question | {"selection_id": "s2", "expected_output_tokens": None, "allowed_worker_ids": [second]}
    selected = client.ask("select and reserve", "POST", "/select_and_reserve", both, wants=Selected)
    assert (selected.selection_id, selected.worker_id, selected.isl_tokens) == ("s2", second, len(tokens))
    client.ask("select and reserve twice", "POST", "/select_and_reserve", both)
    without_id = client.ask("select and reserve without an id", "POST", "/select_and_reserve", question, wants=Selected)
    assert without_id.selection_id and without_id.worker_id == first

    own = {"model_name": MODEL, "selection_id": "s3", "worker_id": first, "dp_rank": 0, "token_ids": tokens}
    client.ask("reserve", "POST", "/reservations", own | {"effective_prefill_tokens": 50}, wants=Reserved)
    by_length = {
        "model_name": MODEL,
        "selection_id": "s4",
        "worker_id": second,
        "sequence_hashes": [1, -2],
        "isl_tokens": 40,
    }
    client.ask("reserve by length", "POST", "/reservations", by_length, wants=Reserved)
    client.ask(
        "reserve too much", "POST", "/reservations", own | {"selection_id": "s5", "effective_prefill_tokens": 5_000}
    )
    assert (load_of(first).potential_prefill_tokens, load_of(second).active_requests) == (58, 2)
    for selection_id in ("s2", "s3", "s4", without_id.selection_id):
        client.ask("release", "DELETE", f"/reservations/{selection_id}", wants=Done)

    client.ask("no prompt", "POST", "/select", {"model_name": MODEL})
    client.ask("no such model", "POST", "/select", question | {"model_name": "none"})
    client.ask("no such worker allowed", "POST", "/select", question | {"allowed_worker_ids": [5]})
    client.ask("a text for a number", "POST", "/select", question | {"token_ids": ["1", 2]})

    moved = {
        "endpoint": "http://127.0.0.1:9003",
        "kv_events_endpoint": None,
        "replay_endpoint": None,
        "block_size": None,
    }
    assert client.ask("move", "PATCH", f"/workers/{first}", moved, wants=Worker).endpoint == moved["endpoint"]
    assert chosen(first).endpoint == moved["endpoint"]
    assert chosen(first).overlap.longest_matched == 192
    for worker_id in (first, second):
        dropped = client.ask("delete", "DELETE", f"/workers/{worker_id}", wants=Worker)
        assert (dropped.worker_id, dropped.lifecycle) == (worker_id, "unschedulable")
    client.ask("delete twice", "DELETE", f"/workers/{first}")
    client.ask("no longer ready", "GET", "/ready")


def drive_ranks(client: Client, streams: Sequence[str], publish: Callable[[], object], tokens: list[int]) -> None:
    """Register one worker with two ranks, and check that a selection finds the rank that has the prompt.

    Args:
        client: The client of the service under test.
        streams: The events endpoint of each rank.
        publish: Publishes once the worker is subscribed to: its second rank stores 12 blocks of `tokens`.
        tokens: The prompt of the selections.
    """
    body = worker_body(7, URLS[0], streams[0], None) | {
        "model_name": "ranks",
        "kv_events_endpoint": None,
        "kv_events_endpoints": {"4": streams[0], "5": streams[1]},
        "data_parallel_start_rank": 4,
        "data_parallel_size": 2,
    }
    assert client.ask("register ranks", "POST", "/workers", body, wants=Worker).worker_id == 7
    publish()
    question = {"model_name": "ranks", "token_ids": tokens}
    until(
        lambda: bool(client.ask("select a rank", "POST", "/select", question, wants=Selected).overlap.gpu == 192),
        client,
    )
    selected = client.ask("select a rank", "POST", "/select", question, wants=Selected)
    assert (selected.worker_id, selected.dp_rank, selected.overlap.dp["5"]) == (7, 5, 192)
    assert client.ask("delete ranks", "DELETE", "/workers/7", wants=Worker).worker_id == 7


def drive_indexer(client: Client, stream: tuple[str, str], publish: Callable[[], object], tokens: list[int]) -> None:
    """Make every request of a client of the indexer, and check the answers.

    Mooncake's RFC has the same shapes, with strings for ids.

    Args:
        client: The client of the indexer under test.
        stream: The events and replay endpoint of the engine.
        publish: Publishes once the engine is subscribed to: it stores 12 blocks of `tokens`.
        tokens: The prompt of the queries.
    """
    body = {"instance_id": 9, "model_name": MODEL, "endpoint": stream[0], "replay_endpoint": stream[1], "block_size": BLOCK,
            "dp_rank": None, "routing_group": "default", "tenant_id": "default", "additional_salt": None}  # fmt: skip
    assert client.ask("register", "POST", "/register", body, wants=Done).status == "ok"
    publish()
    question = {
        "model_name": MODEL,
        "token_ids": tokens,
        "routing_group": "default",
        "lora_name": None,
        "cache_salt": None,
    }
    matched = Overlap(192, 192, {"0": 192}, 192, 192)
    until(
        lambda: bool(client.ask("query", "POST", "/query", question, wants=Scores).scores == {"9": {"0": 192}}), client
    )
    assert client.ask("query", "POST", "/query", question, wants=Scores).instances == {"9": matched}
    client.ask("query of no model", "POST", "/query", question | {"model_name": "none"})
    strange = {"model_name": MODEL, "block_hashes": [1, -2]}
    scores = client.ask("query by hash", "POST", "/query_by_hash", strange, wants=Scores)
    assert scores.instances.get("9", Overlap(0, 0, {}, 0, 0)).longest_matched == 0
    gone = {"instance_id": 9, "model_name": MODEL, "routing_group": None, "dp_rank": None}
    assert client.ask("unregister", "POST", "/unregister", gone, wants=Done).status == "ok"
    client.ask("unregister twice", "POST", "/unregister", gone)
