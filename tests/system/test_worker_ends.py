# SPDX-License-Identifier: Apache-2.0
"""Everything that was learned of a worker, of its process or of an adapter ends with it, and nothing else does."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.engine_http import EngineHttp
from tests.support.fake_engine import BLOCK, MAMBA, SLIDING, FakeEngine, NewEngine, hashes, prompt, removed, stored
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, Wire, chunk

MODEL = "m"
TOKENS = prompt(1)
TIMEOUT_S = 30.0
STREAMS = 20
ADAPTER = "sql"
PATHS = "/adapters/sql-1", "/adapters/sql-2"


@pytest.fixture(autouse=True)
def empty(router: RouterProcess) -> Iterator[None]:
    """Drop all workers after a test."""
    yield
    for row in router.request("GET", "/workers")["workers"]:
        router.unregister(row["worker_id"])


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {TIMEOUT_S:g} s: {what}"
        time.sleep(0.02)


def load(router: RouterProcess) -> dict[str, Any]:
    """Return the entry of the only worker in `/loads`."""
    ((entry,),) = (model["loads"] for model in router.request("GET", "/loads"))
    return dict(entry)


def test_another_layout_under_a_dropped_id_begins_with_nothing(router: RouterProcess, new_engine: NewEngine) -> None:
    former = new_engine()
    former.join(router, "w0", MODEL)
    events = stored(TOKENS, 0, 12), stored(TOKENS, 0, 12, 1, **SLIDING), stored(TOKENS, 0, 12, 2, **MAMBA)
    router.wait_seen("w0", former.publish(*events))
    assert router.query(MODEL, "w0", tuple(TOKENS), None)["longest_matched"] == 12 * BLOCK
    for number in range(3):
        request = {"model": MODEL, "token_ids": prompt(2 + number, 64), "selection_id": f"s{number}"}
        router.request("POST", "/select_and_reserve", request)
        router.request("POST", f"/reservations/s{number}/prefill_complete", {})
        router.request("DELETE", f"/reservations/s{number}")
    assert load(router)["prefill_rate"] is not None

    router.request("DELETE", "/workers/w0")
    engine = new_engine()
    engine.join(router, "w0", MODEL)
    assert load(router)["prefill_rate"] is None, "the former worker's speed"
    # The group is one that the engine has, or had before the router listened; no store has described it yet.
    row = router.wait_seen("w0", engine.publish(*removed(hashes(TOKENS)[:1], 2)))
    assert [group["group_idx"] for group in row["catalog"]["groups"]] == [2]
    assert "group 2" in row["catalog"]["problem"] and row["hash_scheme"].endswith("(assumed)")
    row = router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 6)))
    assert [group["group_idx"] for group in row["catalog"]["groups"]] == [0, 2]
    assert router.query(MODEL, "w0", tuple(TOKENS), None)["longest_matched"] == 0
    router.wait_seen("w0", engine.publish(stored(TOKENS, 0, 6, 2, **MAMBA)))
    assert router.query(MODEL, "w0", tuple(TOKENS), None)["longest_matched"] == 6 * BLOCK


@pytest.mark.parametrize("dropped", [False, True], ids=["registered differently", "dropped and registered again"])
def test_streams_that_outlive_a_registration_keep_counting(
    router: RouterProcess, new_engine: NewEngine, dropped: bool
) -> None:
    goes_on = threading.Event()

    async def hold(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, chunk(b'data: {"choices": [{"text": "a"}]}\n\n'))
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        await wire.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    with ScriptedEngine(hold) as served, ExitStack() as stack:
        new_engine().join(router, "w0", MODEL, url=served.url)
        connections = []
        for number in range(STREAMS):
            connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=TIMEOUT_S)
            stack.callback(connection.close)
            body = {"model": MODEL, "prompt": [number + 1] * 40, "max_tokens": 9, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            connections.append(connection)
        answers = [connection.getresponse() for connection in connections]
        assert {answer.status for answer in answers} == {200}
        assert load(router)["active_requests"] == STREAMS
        if dropped:
            router.request("DELETE", "/workers/w0")
        new_engine().join(router, "w0", MODEL, url=served.url)
        assert load(router)["active_requests"] == STREAMS
        goes_on.set()
        for answer in answers:
            answer.read()
        until(lambda: load(router)["active_requests"] == 0, "all streams have ended")
        entry = load(router)
        assert (entry["potential_prefill_tokens"], entry["decode_tokens"]) == (0, 0)


def with_adapter(path: str, last: int) -> Any:
    """Return the store of the first blocks of TOKENS as the adapter at `path` computes them."""
    chain = hashes(TOKENS, lora=(ADAPTER, path))
    return stored(TOKENS, 0, last, chain=chain, lora_name=ADAPTER, extra_keys=[(ADAPTER,)] * last)


def models(path: str) -> bytes:
    """Return vLLM's list of models with the adapter at `path`."""
    adapter = {"id": ADAPTER, "root": path, "parent": MODEL}
    return json.dumps({"data": [{"id": MODEL, "root": MODEL, "parent": None}, adapter]}).encode()


@pytest.mark.parametrize("catalog", [None, {"lora_paths": {ADAPTER: PATHS[0]}}], ids=["listed", "registered, too"])
def test_an_adapter_that_is_loaded_again_in_place_earns_nothing_for_its_former_blocks(
    router: RouterProcess, engine: FakeEngine, http: EngineHttp, catalog: dict[str, Any] | None
) -> None:
    http.pages["/v1/models"] = models(PATHS[0])
    engine.join(router, "w0", MODEL, url=http.url, **({} if catalog is None else {"catalog": catalog}))
    router.wait_seen("w0", engine.publish(stored(prompt(9), 0, 2), with_adapter(PATHS[0], 12)))

    def hit() -> int:
        body = {"model": MODEL, "token_ids": TOKENS, "lora_name": ADAPTER}
        return int(router.request("POST", "/query", body)["instances"]["w0"]["longest_matched"])

    until(lambda: hit() == 12 * BLOCK, "the adapter's blocks count")
    http.pages["/v1/models"] = models(PATHS[1])
    until(lambda: hit() == 0, "the blocks of the former weights count no more")
    router.wait_seen("w0", engine.publish(with_adapter(PATHS[1], 3)))
    assert hit() == 3 * BLOCK


def test_an_adapter_that_is_loaded_again_in_place_ends_the_guesses_about_it(
    router: RouterProcess, http: EngineHttp
) -> None:
    http.pages["/v1/models"] = models(PATHS[0])
    router.request("POST", "/register", {"worker_id": "w0", "model": MODEL, "url": http.url})

    def hit(lora_name: str | None) -> int:
        body = {"model": MODEL, "token_ids": TOKENS, "lora_name": lora_name}
        return int(router.request("POST", "/query", body)["instances"]["w0"]["longest_matched"])

    until(lambda: ADAPTER in router.text("/v1/models"), "the adapter is known")
    for name in (None, ADAPTER):
        request = {"model": MODEL, "token_ids": TOKENS, "lora_name": name}
        router.request("POST", "/select_and_reserve", request)
        assert hit(name) == 12 * BLOCK
    http.pages["/v1/models"] = models(PATHS[1])
    until(lambda: hit(ADAPTER) == 0, "the prompts sent to the former weights count no more")
