# SPDX-License-Identifier: Apache-2.0
"""Prompts that prefill workers compute and decode workers go on with.

One router stands before simulated replicas that speak vLLM's kv_transfer_params. Each test has its own model.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.engine.timing import Timing
from tests.support.fleet import until
from tests.support.prefill_pools import (
    COMPLETIONS,
    LONG,
    MODELS,
    POOL_FLAGS,
    WAIT_S,
    Pools,
    cached,
    fault,
    is_idle,
    outcomes,
    tokens,
)
from tests.support.router_process import RouterProcess

# A step takes some 5 ms and a long prompt some 50 ms, so that requests overlap.
SLOW = Timing(40_000.0, 0.002, 0.0005)


ROUTER_FLAGS = POOL_FLAGS


@pytest.fixture
def pools(router: RouterProcess) -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(router, stack, f"m{next(MODELS)}")


def test_a_long_prompt_is_computed_here_and_decoded_there(pools: Pools) -> None:
    p0, d0 = pools.add("p0"), pools.add("d0")
    prompt = tokens(1)
    before = outcomes(pools.router)
    pools.occupy("d0")
    status, headers, answer = pools.ask(prompt)
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-prefill-worker"]) == (200, "d0", "p0")
    assert headers["x-kvrouter-predicted-hit"] == "0" and "x-kvrouter-retried" not in headers
    # The prefill worker held nothing of the prompt, and the decode worker received all of it but the last token.
    assert cached(answer) == 0 and answer["usage"]["completion_tokens"] == 4
    assert p0.api.life.engine.prompt_tokens == d0.api.life.engine.prompt_tokens == LONG
    assert outcomes(pools.router) - before == Counter(remote=1, done=1)
    # For the same prefix with a long new part, the answer reports the prefill worker's hit as cached.
    again = prompt + tokens(2, LONG)
    until(lambda: pools.hit("p0", again) > 0 and pools.hit("d0", again) > 0, "both have reported their blocks")
    predicted = pools.hit("p0", again)
    status, headers, answer = pools.ask(again)
    assert headers["x-kvrouter-prefill-worker"] == "p0"
    assert (int(headers["x-kvrouter-predicted-hit"]), cached(answer)) == (predicted, predicted)
    assert 0 < predicted <= LONG
    # In a second turn, the decode worker holds nearly all of the prompt, so it computes the rest alone.
    turn = again + answer_ids(answer) + tokens(3, 40)
    until(lambda: pools.hit("d0", turn) >= 2 * LONG - 600, "the decode worker has reported its blocks")
    predicted = pools.hit("d0", turn)
    status, headers, answer = pools.ask(turn)
    assert headers["x-kvrouter-worker"] == "d0" and "x-kvrouter-prefill-worker" not in headers
    assert (int(headers["x-kvrouter-predicted-hit"]), cached(answer)) == (predicted, predicted)
    # A short prompt is not handed over.
    status, headers, _ = pools.ask(tokens(4, 300))
    assert headers["x-kvrouter-worker"] == "d0" and "x-kvrouter-prefill-worker" not in headers
    assert outcomes(pools.router) - before == Counter(remote=2, done=2, short=2)
    pools.free("d0")
    until(lambda: is_idle(pools), "no load is left")


def answer_ids(answer: Any) -> list[int]:
    return list(tokenizer.encode(answer["choices"][0]["text"]))


def test_a_streamed_chat_is_handed_over_too(pools: Pools) -> None:
    pools.add("p0")
    pools.add("d0")
    pools.occupy("d0")
    connection = http.client.HTTPConnection("127.0.0.1", pools.router.port, timeout=WAIT_S)
    messages = [{"role": "user", "content": "word " * 3_000}]
    body = {"model": pools.model, "messages": messages, "stream": True, "max_completion_tokens": 6, "min_tokens": 3}
    body["stream_options"] = {"include_usage": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    answer = connection.getresponse()
    lines = answer.read().split(b"\n\n")
    assert answer.getheader("x-kvrouter-prefill-worker") == "p0" and lines[-2] == b"data: [DONE]"
    assert json.loads(lines[-3].removeprefix(b"data: "))["usage"]["completion_tokens"] == 6
    connection.close()


def test_select_names_both_and_a_reservation_counts_at_both(pools: Pools) -> None:
    pools.add("p0")
    pools.add("d0")
    pools.occupy("d0")
    busy = pools.loads()["d0"]
    body = {"model": pools.model, "token_ids": tokens(1), "max_tokens": 10, "explain": True}
    answer = pools.router.request("POST", "/select", body)
    assert (answer["worker_id"], answer["prefill"]["worker_id"]) == ("d0", "p0")
    assert answer["prefill"]["endpoint"] == pools.replicas["p0"].endpoints["url"]
    assert (answer["prefill"]["handover"], answer["prefill"]["effective_prefill_tokens"]) == (
        "kv_transfer_params",
        LONG,
    )
    assert [candidate["worker_id"] for candidate in answer["candidates"]] == ["d0"]
    assert [candidate["worker_id"] for candidate in answer["prefill"]["candidates"]] == ["p0"]
    answer = pools.router.request("POST", "/select_and_reserve", body | {"token_ids": tokens(2)})
    assert answer["prefill"]["worker_id"] == "p0"
    assert pools.loads() == {"p0": (LONG, 1), "d0": (busy[0], busy[1] + 1)}
    pools.router.request("POST", f"/reservations/{answer['selection_id']}/prefill_complete")
    assert pools.loads() == {"p0": (0, 0), "d0": (busy[0], busy[1] + 1)}
    pools.router.request("DELETE", f"/reservations/{answer['selection_id']}")
    assert pools.loads() == {"p0": (0, 0), "d0": busy}
    short = pools.router.request("POST", "/select", body | {"token_ids": tokens(3, 64)})
    assert "prefill" not in short
    pools.free("d0")


def test_a_prefill_worker_that_dies_meanwhile_loses_no_request(pools: Pools) -> None:
    p0, d0 = pools.add("p0"), pools.add("d0")
    pools.occupy("d0")
    before = outcomes(pools.router)
    fault(p0, stall_s=WAIT_S)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pending = pool.submit(pools.ask, tokens(1))
        until(lambda: p0.api.life.engine.num_running > 0, "the prefill has begun")
        fault(p0, restart=True, down_s=WAIT_S)
        status, headers, answer = pending.result(WAIT_S)
    assert status == 200 and answer["usage"]["completion_tokens"] == 4
    assert headers["x-kvrouter-worker"] == "d0" and "x-kvrouter-prefill-worker" not in headers
    assert headers["x-kvrouter-retried"] in ("p0 reset", "p0 lost")
    assert outcomes(pools.router) - before == Counter(remote=1, failed=1)
    # While the prefill worker is down, no prompt is sent there, and that is counted.
    until(lambda: pools.router.worker("p0")["state"] == "down", "its health is seen")
    status, headers, _ = pools.ask(tokens(2))
    assert (status, "x-kvrouter-retried" in headers) == (200, False)
    assert outcomes(pools.router)["unavailable"] == before["unavailable"] + 1
    pools.free("d0")
    until(lambda: is_idle(pools), "no load is left")
    assert d0.api.life.engine.prompt_tokens == 2 * LONG


def test_another_prefill_worker_gets_the_prompt_where_the_first_cannot_be_reached(pools: Pools) -> None:
    pools.add("p1")
    pools.add("d0")
    pools.occupy("d0", "p1")
    for attempt in range(2, 12):
        name = f"p{attempt}"
        # The worker goes between two health checks. Once the router has seen that nothing listens there, the worker is
        # down and not tried at all.
        with socket.create_server(("127.0.0.1", 0)) as gone:
            gone.settimeout(WAIT_S)
            # The registration names an event endpoint, so the engine is not queried for one.
            at = f"127.0.0.1:{gone.getsockname()[1]}"
            pools.register(name, f"http://{at}", endpoint=f"tcp://{at}", patch_endpoint="off")
            gone.accept()[0].close()
        status, headers, _ = pools.ask(tokens(attempt), max_tokens=2)
        assert status == 200
        if "x-kvrouter-retried" in headers:
            break
    # The worker with nothing queued was tried first. It never got the request, so the other prefill worker may.
    assert (headers["x-kvrouter-retried"], headers.get("x-kvrouter-prefill-worker")) in (
        (f"{name} refused", "p1"),
        (f"{name} refused", None),
    )
    pools.free("d0", "p1")


def test_a_decode_worker_that_dies_is_replaced_by_another(pools: Pools) -> None:
    pools.add("p0")
    for name in ("d0", "d1"):
        pools.add(name)
    pools.occupy("d0", "d1")
    prompt = tokens(1)
    # Learn which decode worker will be chosen, and let it fail when it is called.
    first = pools.router.request("POST", "/select", {"model": pools.model, "token_ids": prompt})["worker_id"]
    other = "d1" if first == "d0" else "d0"
    fault(pools.replicas[first], fail=1, fail_status=503)
    status, headers, answer = pools.ask(prompt)
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-retried"]) == (200, other, f"{first} gone")
    assert headers["x-kvrouter-prefill-worker"] == "p0" and answer["usage"]["completion_tokens"] == 4
    pools.free("d0", "d1")
    until(lambda: is_idle(pools), "no load is left")


def test_blocks_that_could_not_be_fetched_are_computed(pools: Pools) -> None:
    pools.add("p0")
    d0 = pools.add("d0")
    pools.occupy("d0")
    # vLLM answers 500 if kv_load_failure_policy is `fail`, its default.
    fault(d0, fail=1, fail_status=500)
    status, headers, answer = pools.ask(tokens(1))
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-retried"]) == (200, "d0", "d0 gone")
    assert "x-kvrouter-prefill-worker" not in headers and answer["usage"]["completion_tokens"] == 4
    # A 500 for a prompt that the engine computed itself passes to the client.
    fault(d0, fail=1, fail_status=500)
    assert pools.ask(tokens(2, 100))[0] == 500
    pools.free("d0")


def test_a_client_that_hangs_up_ends_either_request(pools: Pools) -> None:
    p0, d0 = pools.add("p0", SLOW), pools.add("d0", SLOW)
    pools.occupy("d0")
    body = json.dumps({"model": pools.model, "prompt": tokens(1), "max_tokens": 3_000, "stream": True}).encode()
    request = (
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body)) + body
    )
    for replica in (p0, d0):
        if replica is p0:
            fault(p0, stall_s=2.0)
        with socket.create_connection(("127.0.0.1", pools.router.port)) as client:
            client.sendall(request)
            until(lambda: replica.api.life.engine.num_running > 0, "it runs")  # noqa: B023
        until(
            lambda: (
                not (p0.api.life.engine.num_running or d0.api.life.engine.num_running or p0.api.life.engine.num_waiting)
            ),
            "it is aborted",
        )
    pools.free("d0")
    until(lambda: is_idle(pools), "no load is left")


def test_two_pools_under_load_answer_all_and_keep_nothing(pools: Pools) -> None:
    for name in ("p0", "p1", "d0", "d1"):
        pools.add(name, SLOW)
    before = outcomes(pools.router)
    rng = random.Random(5)
    prompts = [tokens(100 + n, rng.choice((64, 256, LONG, LONG + 512))) for n in range(80)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: pools.ask(prompt, max_tokens=24), prompts))
    assert [status for status, _, _ in answers] == [200] * len(prompts)
    decoded = Counter(headers["x-kvrouter-worker"] for _, headers, _ in answers)
    computed = Counter(headers.get("x-kvrouter-prefill-worker", "alone") for _, headers, _ in answers)
    assert set(decoded) == {"d0", "d1"} and sum(decoded.values()) == len(prompts)
    assert computed["p0"] and computed["p1"] and computed["alone"]
    for prompt, (_, headers, _) in zip(prompts, answers, strict=True):
        assert len(prompt) >= 512 or "x-kvrouter-prefill-worker" not in headers
    counted = outcomes(pools.router) - before
    assert counted["done"] == counted["remote"] == computed["p0"] + computed["p1"]
    engines = {name: replica.api.life.engine for name, replica in pools.replicas.items()}
    # Each prefill worker samples one token of each of its prompts, and none of any other prompt.
    assert {name: engine.generated_tokens for name, engine in engines.items() if name.startswith("p")} == {
        "p0": computed["p0"],
        "p1": computed["p1"],
    }
    assert sum(engines[name].generated_tokens for name in ("d0", "d1")) == 24 * len(prompts)
    until(lambda: is_idle(pools), "no load is left")
    print(f"decoded {dict(decoded)}, computed {dict(computed)}")


def test_prefill_workers_alone_are_a_503_that_says_so(pools: Pools) -> None:
    pools.add("p0")
    status, _, answer = pools.ask(tokens(1))
    assert (status, answer["error"]["code"]) == (503, "no_worker")
    assert "p0: role prefill; register a worker that decodes (role decode or both)" in answer["error"]["message"]
