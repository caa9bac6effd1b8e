# SPDX-License-Identifier: Apache-2.0
"""The two requests of a hand-over, and the consequences of every answer: one router, and scripted engines.

Each test has its own model.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.fleet import until
from tests.support.prefill_pools import (
    COMPLETIONS,
    LONG,
    MODELS,
    POOL_FLAGS,
    WAIT_S,
    Pools,
    is_idle,
    outcomes,
    tokens,
)
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import Asked, ScriptedEngine, Wire, hang, plain, reset

ANSWER = json.dumps({"choices": [], "usage": {"completion_tokens": 1}}).encode()
# The engine gives the prompt up, and its blocks are free whatever it says of them.
ABORTED = json.dumps(
    {
        "choices": [{"finish_reason": "abort"}],
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    }
).encode()
KEPT = json.dumps(
    {"choices": [{"finish_reason": "length"}], "kv_transfer_params": {"do_remote_prefill": False}}
).encode()
LENGTH = json.dumps({"choices": [{"finish_reason": "length"}], "kv_transfer_params": None}).encode()
GIVES = json.dumps({"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]}}).encode()


ROUTER_FLAGS = POOL_FLAGS


@pytest.fixture
def pools(router: RouterProcess) -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(router, stack, f"m{next(MODELS)}")


def completions(engine: ScriptedEngine) -> list[Asked]:
    return [asked for asked in engine.asked if asked.target == COMPLETIONS]


@pytest.mark.parametrize(
    ("script", "outcome", "retried"),
    [
        (plain(ANSWER), "declined", None),
        (plain(b'{"kv_transfer_params": null}'), "declined", None),
        (plain(b"no JSON"), "declined", None),
        (plain(LENGTH), "declined", None),
        (plain(KEPT), "declined", None),
        (plain(ABORTED), "aborted", None),
        (plain(b'{"error": {}}', "400 Bad Request"), "refused", None),
        (plain(b"", "500 Oh"), "failed", None),
        (plain(b"", "503 Later"), "failed", "p0 gone"),
        (reset, "failed", "p0 reset"),
    ],
)
def test_whatever_the_prefill_worker_answers_the_decode_worker_can_do_it(
    pools: Pools, script: Any, outcome: str, retried: str | None
) -> None:
    prefill, decode = ScriptedEngine(script), ScriptedEngine(plain(ANSWER))
    pools.script("p0", prefill)
    pools.script("d0", decode)
    pools.occupy("d0")
    before = outcomes(pools.router)
    status, headers, _ = pools.ask(tokens(1))
    assert (status, headers["x-kvrouter-worker"], headers.get("x-kvrouter-retried")) == (200, "d0", retried)
    assert "x-kvrouter-prefill-worker" not in headers
    assert outcomes(pools.router) - before == Counter({"remote": 1, outcome: 1})
    assert len(completions(prefill)) == 1
    (asked,) = completions(decode)
    assert "kv_transfer_params" not in json.loads(asked.body)
    pools.free("d0")


def test_the_reuse_of_a_decode_side_is_not_compared(pools: Pools) -> None:
    """The decode side reports the tokens that the prefill side reused, or those that it fetched itself."""
    details = {"cached_tokens": 1_024}
    usage = {"prompt_tokens": LONG, "completion_tokens": 1, "prompt_tokens_details": details}
    reuses = plain(json.dumps({"choices": [], "usage": usage}).encode())
    prefill, decode = ScriptedEngine(plain(GIVES)), ScriptedEngine(reuses)
    pools.script("p0", prefill)
    pools.script("d0", decode)
    pools.occupy("d0")
    answers = [pools.ask(tokens(1)), pools.ask(tokens(2), kv_transfer_params=json.loads(GIVES)["kv_transfer_params"])]
    assert [headers.get("x-kvrouter-prefill-worker") for _, headers, _ in answers] == ["p0", None]
    for _, headers, _ in answers:
        selection = headers["x-kvrouter-selection-id"]
        outcome = pools.router.request("GET", f"/decisions/{selection}")["outcome"]
        assert (outcome["predicted_tokens"], outcome["delivered_tokens"]) == (None, 1_024)
    pools.free("d0")


def test_the_two_requests_say_what_vllm_wants(pools: Pools) -> None:
    prefill, decode = ScriptedEngine(plain(GIVES)), ScriptedEngine(plain(ANSWER))
    pools.script("p0", prefill)
    pools.script("d0", decode)
    pools.occupy("d0")
    sent = {"min_tokens": 3, "logprobs": 2, "temperature": 0.5, "stream": False, "stream_options": None, "seed": 7}
    headers = {"x-request-id": "mine", "x-prefiller-host-port": "evil:1", "accept-encoding": "gzip"}
    assert pools.ask(tokens(1), headers=headers, **sent)[0] == 200
    (first,), (second,) = completions(prefill), completions(decode)
    body = json.loads(first.body)
    assert body == {
        "model": pools.model,
        "prompt": tokens(1),
        "max_tokens": 1,
        "temperature": 0.5,
        "seed": 7,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    transfer_params = json.loads(GIVES)["kv_transfer_params"]
    assert json.loads(second.body) == {
        "model": pools.model,
        "prompt": tokens(1),
        "max_tokens": 4,
        **sent,
        "kv_transfer_params": transfer_params,
    }
    assert first.all("x-request-id") == second.all("x-request-id") == ["mine"]
    assert not first.all("x-prefiller-host-port") and not second.all("x-prefiller-host-port")
    assert (first.all("accept-encoding"), second.all("accept-encoding")) == ([], ["gzip"])
    pools.free("d0")


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}, {"max_tokens": 1}, {"kv_transfer_params": {"a": 1}}])
def test_what_cannot_be_handed_over_continues_as_it_came(pools: Pools, fields: dict[str, Any]) -> None:
    prefill, decode = ScriptedEngine(plain(GIVES)), ScriptedEngine(plain(ANSWER))
    pools.script("p0", prefill)
    pools.script("d0", decode)
    pools.occupy("d0")
    before = outcomes(pools.router)
    assert pools.ask(tokens(1), **fields)[0] == 200
    assert not completions(prefill) and outcomes(pools.router) - before == Counter(request=1)
    assert json.loads(completions(decode)[0].body) == {
        "model": pools.model,
        "prompt": tokens(1),
        "max_tokens": 4,
        **fields,
    }
    pools.free("d0")


def test_a_sidecar_learns_where_the_prompt_is_to_be_computed(pools: Pools) -> None:
    async def sidecar(asked: Asked, wire: Wire) -> None:
        """Answer as llm-d's sidecar does: with an error of its own if it gets nothing from the prefill worker."""
        fails = asked.target == COMPLETIONS and unreachable and asked.all("x-prefiller-host-port")
        await plain(ANSWER, "502 Bad Gateway" if fails else "200 OK")(asked, wire)

    unreachable = False
    prefill, decode = ScriptedEngine(plain(GIVES)), ScriptedEngine(sidecar)
    pools.script("p0", prefill)
    pools.script("d0", decode, handover="header")
    pools.occupy("d0")
    before = outcomes(pools.router)
    status, headers, _ = pools.ask(tokens(1), headers={"x-prefiller-host-port": "evil:1", "x-prefiller-url": "evil"})
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-prefill-worker"]) == (200, "d0", "p0")
    (asked,) = completions(decode)
    assert asked.all("x-prefiller-host-port") == [f"127.0.0.1:{prefill.port}"] and not asked.all("x-prefiller-url")
    assert json.loads(asked.body) == {"model": pools.model, "prompt": tokens(1), "max_tokens": 4}
    assert not completions(prefill) and outcomes(pools.router) - before == Counter(remote=1, named=1)
    unreachable = True
    status, headers, _ = pools.ask(tokens(2))
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-retried"]) == (200, "d0", "d0 gone")
    assert "x-kvrouter-prefill-worker" not in headers
    assert [len(asked.all("x-prefiller-host-port")) for asked in completions(decode)] == [1, 1, 0]
    pools.free("d0")
    until(lambda: is_idle(pools), "no load is left")


def test_an_engine_without_a_connector_is_named_and_left_alone(pools: Pools) -> None:
    prefill, decode = ScriptedEngine(plain(ANSWER)), ScriptedEngine(plain(ANSWER))
    pools.script("p0", prefill)
    pools.script("d0", decode)
    pools.occupy("d0")
    for seed in range(5):
        assert pools.ask(tokens(seed))[0] == 200
    assert "start the engine with --kv-transfer-config" in pools.router.worker("p0")["closed"]
    assert any("--kv-transfer-config" in why for why in pools.router.request("GET", "/health")["reasons"])
    pools.free("d0")


def test_a_prefill_worker_that_hangs_is_given_up_when_its_health_is_gone(pools: Pools) -> None:
    prefill, decode = ScriptedEngine(hang), ScriptedEngine(plain(ANSWER))
    pools.script("p0", prefill)
    pools.script("d0", decode)
    until(lambda: pools.router.worker("p0")["state"] != "down", "it was seen alive")
    pools.occupy("d0")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pending = pool.submit(pools.ask, tokens(1))
        until(lambda: bool(completions(prefill)), "it is called")
        prefill.healthy = False
        status, headers, _ = pending.result(WAIT_S)
    assert (status, headers["x-kvrouter-retried"]) == (200, "p0 lost")
    pools.free("d0")
