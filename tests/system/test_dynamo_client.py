# SPDX-License-Identifier: Apache-2.0
"""A client that knows only Dynamo's or Mooncake's shapes, at Dynamo's own services if installed, and at ours."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvrouter.events.vllm.codec import encode_batch
from tests.support.dynamo_client import LARGEST_ID, Client, Exchange, drive_indexer, drive_ranks, drive_selection
from tests.support.fake_engine import FakeEngine, hashes, prompt, removed, stored
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

VERSION = "1.6.1"
DYNAMO = (
    Path.home() / ".cache" / "hybrid-kv-router" / f"dynamo-{VERSION}-{platform.python_version()}" / "bin" / "python"
)
GOLDEN = Path(__file__).parents[1] / "golden" / "dynamo_1_6_1.json"
TOKENS = prompt(1)

# Fields that Dynamo's answers have and ours lack: hints of its scheduler, and facts about the worker that we do not
# use.
NOT_OURS = frozenset(
    (
        *("sequence_hashes", "track_prefill_tokens", "kv_events_endpoints", "data_parallel_start_rank"),
        *("data_parallel_size", "max_num_batched_tokens", "total_kv_blocks", "stable_routing_id", "is_eagle", "taints"),
        *("topology_domains", "kv_transfer_domain", "kv_transfer_enforcement", "kv_transfer_preferred_weight"),
        # Dynamo lists the workers at GET /ready, and we do at GET /workers.
        "workers",
    )
)
# Fields whose values may differ from Dynamo's, but not their types. Our answers count a load with its prompt, and also
# a prompt of which only the length is known. Ids are made up. If a worker has several ranks, we name the chosen one.
# The client checks the values that it reads itself.
OWN_NUMBERS = frozenset({"potential_decode_blocks", "potential_prefill_tokens", "selection_id", "dp"})
# Our statuses where they differ from Dynamo's: 200 in place of 201 for an added worker, 404 for a missing thing, and
# 400 for a value over its bounds.
OWN_STATUSES = {
    "register": 200,
    "register ranks": 200,
    "no such model": 404,
    "no such worker allowed": 404,
    "a text for a number": 400,
}


@contextmanager
def service(module: str, folder: Path) -> Iterator[int]:
    """Run one of Dynamo's own services on a free port, and yield the port."""
    port = free_port()
    with (folder / f"{module}.log").open("wb") as log:
        command = [str(DYNAMO), "-m", module, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 60.0
        while process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def pair(context: zmq.Context[zmq.Socket[bytes]], engines: list[FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    engines += [FakeEngine(context), FakeEngine(context)]
    return engines[0], engines[1]


def addresses(engine: FakeEngine) -> tuple[str, str]:
    assert engine.replay_endpoint is not None
    return engine.endpoint, engine.replay_endpoint


def selection_exchanges(port: int, pair: tuple[FakeEngine, FakeEngine]) -> list[Exchange]:
    """Do everything that a client of the selection service does, at the service on `port`."""
    first, second = pair

    def publish() -> None:
        first.wait_subscribed()
        second.wait_subscribed()
        first.publish(stored(TOKENS, 0, 12))
        second.publish(stored(TOKENS, 0, 3))

    other = prompt(2)

    def publish_rank() -> None:
        second.wait_subscribed()
        second.publish_raw(encode_batch(time.time(), [stored(other, 0, 12)], 5))

    with closing(Client(port)) as client:
        drive_selection(client, [addresses(first), addresses(second)], publish, TOKENS)
        second.wait_subscribed(False)
        drive_ranks(client, [first.endpoint, second.endpoint], publish_rank, other)
    return client.exchanges


def indexer_exchanges(port: int, engine: FakeEngine) -> list[Exchange]:
    def publish() -> None:
        engine.wait_subscribed()
        engine.publish(stored(TOKENS, 0, 12))

    with closing(Client(port)) as client:
        drive_indexer(client, addresses(engine), publish, TOKENS)
    return client.exchanges


def golden(name: str) -> list[Exchange]:
    return msgspec.convert(json.loads(GOLDEN.read_text())[name], list[Exchange])


def written(exchanges: Sequence[Exchange], engines: Sequence[FakeEngine]) -> list[dict[str, Any]]:
    """Return the exchanges as the golden file has them, without the parts that differ from run to run."""
    text = msgspec.json.encode(exchanges).decode().replace(json.dumps(TOKENS, separators=(",", ":")), '"TOKENS"')
    text = text.replace(json.dumps(prompt(2), separators=(",", ":")), '"OTHER TOKENS"')
    for n, engine in enumerate(engines, 1):
        text = text.replace(engine.endpoint, f"tcp://events-{n}").replace(addresses(engine)[1], f"tcp://replay-{n}")
    deleted_ids = [
        exchange["path"].rpartition("/")[2] for exchange in json.loads(text) if exchange["method"] == "DELETE"
    ]
    for selection_id in deleted_ids:
        if len(selection_id) >= 30:
            text = text.replace(selection_id, "MADE")
    return list(json.loads(text))


def check_alike(ours: Sequence[dict[str, Any]], theirs: Sequence[Exchange]) -> None:
    """Check that our answers contain everything that Dynamo's contain; ours may contain more."""
    assert [exchange["name"] for exchange in ours] == [exchange.name for exchange in theirs]
    for mine, their in zip(ours, theirs, strict=True):
        where = f"{their.name}: {their.method} {their.path}"
        wanted = OWN_STATUSES.get(their.name, their.status)
        assert mine["status"] == wanted or (mine["status"] // 100 == 2 == their.status // 100), (where, mine)
        if their.status < 300:
            check_value(mine["answer"], their.answer, where)
        else:
            assert mine["answer"]["error"]["message"], where


def check_value(mine: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, dict):
        assert isinstance(mine, dict), where
        for name, value in theirs.items():
            if name in NOT_OURS:
                continue
            assert name in mine, f"{where} has no {name}"
            if name in OWN_NUMBERS:
                assert type(mine[name]) is type(value), f"{where}: {name}"
            else:
                check_value(mine[name], value, f"{where}.{name}")
    elif isinstance(theirs, list):
        assert isinstance(mine, list) and len(mine) == len(theirs), where
        for my_item, their_item in zip(mine, theirs, strict=True):
            check_value(my_item, their_item, where)
    elif theirs is not None:
        assert mine == theirs, where


@pytest.mark.skipif(not DYNAMO.exists(), reason=f"ai-dynamo-runtime {VERSION} is not installed in {DYNAMO.parents[1]}")
def test_the_clients_are_those_of_dynamos_own_services(tmp_path: Path, pair: tuple[FakeEngine, FakeEngine]) -> None:
    with service("dynamo.select_service", tmp_path) as port:
        exchanges = written(selection_exchanges(port, pair), pair)
    assert [(exchange["name"], exchange["status"]) for exchange in exchanges] == [
        (exchange.name, exchange.status) for exchange in golden("selection")
    ]
    # Wait until the ended service has unsubscribed; otherwise a publication would count as heard.
    pair[0].wait_subscribed(False)
    with service("dynamo.indexer", tmp_path) as port:
        exchanges = written(indexer_exchanges(port, pair[0]), pair)
    assert [(exchange["name"], exchange["status"]) for exchange in exchanges] == [
        (exchange.name, exchange.status) for exchange in golden("indexer")
    ]


def test_a_client_of_the_selection_service_is_answered_alike(
    tmp_path: Path, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    # Nothing listens at the endpoints that the client names.
    with RouterProcess(tmp_path, ["--health-interval-s", "0"]) as router:
        check_alike(written(selection_exchanges(router.port, pair), pair), golden("selection"))
        # The client has left no worker.
        assert router.request("GET", "/workers") == {"workers": []}


def test_a_client_of_the_indexer_is_answered_alike(router: RouterProcess, pair: tuple[FakeEngine, FakeEngine]) -> None:
    ours = written(indexer_exchanges(router.port, pair[0]), pair)
    # Dynamo's indexer lists no worker without a hit. A client that looks up a worker in the map gets the same result.
    by_hash = next(exchange for exchange in golden("indexer") if exchange.name == "query by hash")
    assert by_hash.answer["instances"] == {}
    check_alike(ours, golden("indexer"))


def test_a_client_of_mooncakes_rfc_is_served(router: RouterProcess, pair: tuple[FakeEngine, FakeEngine]) -> None:
    """Use the names of Mooncake's RFC: modelname, type, additionalsalt, tenant_id.

    Instance ids are texts, and hashes are u64.
    """
    first, second = pair
    for rank, engine in enumerate(pair):
        engine.dp_rank = rank
        events, replay = addresses(engine)
        body = {"endpoint": events, "replay_endpoint": replay, "type": "vLLM", "modelname": "rfc", "lora_name": "",
                "tenant_id": "default", "instance_id": "vllm-prefill-node1", "block_size": 16, "dp_rank": rank,
                "additionalsalt": ""}  # fmt: skip
        assert router.request("POST", "/register", body) == {"status": "ok", "worker_id": "vllm-prefill-node1"}
    for engine in pair:
        engine.wait_subscribed()
    first.publish(stored(TOKENS, 0, 12))
    second.publish(stored(TOKENS, 0, 6))
    question = {"model": "rfc", "lora_name": None, "token_ids": TOKENS, "tenant_id": "default", "block_size": 16}
    deadline = time.monotonic() + 30.0
    while True:
        answer = router.request("POST", "/query", question)
        row = answer["instances"]["vllm-prefill-node1"]
        if row["dp"] == {"0": 192, "1": 96}:
            break
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)
    assert (row["longest_matched"], row["gpu"], row["cpu"], row["disk"]) == (192, 192, 192, 192)
    by_hash = {"model": "rfc", "block_hashes": hashes(TOKENS)[:6], "tenant_id": "default", "block_size": 16}
    instance = router.request("POST", "/query_by_hash", by_hash)["instances"]["vllm-prefill-node1"]
    assert (instance["longest_matched"], instance["dp"]) == (96, {"0": 96, "1": 96})
    first.publish(*removed(hashes(TOKENS)[3:]))
    while router.request("POST", "/query", question)["instances"]["vllm-prefill-node1"]["dp"]["0"] != 48:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    gone = {"type": "vLLM", "modelname": "rfc", "tenant_id": "default", "instance_id": "vllm-prefill-node1",
            "block_size": 16, "dp_rank": 0}  # fmt: skip
    assert router.request("POST", "/unregister", gone)["status"] == "ok"
    assert router.request("POST", "/query", question)["instances"]["vllm-prefill-node1"]["dp"] == {"1": 96}
    router.request("POST", "/unregister", gone | {"dp_rank": 1})


def test_a_group_of_its_own_is_refused_and_never_mixed_in(router: RouterProcess) -> None:
    body = {"worker_id": LARGEST_ID, "model_name": "m", "routing_group": "acme", "endpoint": "http://127.0.0.1:9001"}
    status, answer = router._ask("POST", "/workers", json.dumps(body))
    assert status == 400 and "routing_group" in json.loads(answer)["error"]["message"]
    assert router.request("GET", "/workers") == {"workers": []}
