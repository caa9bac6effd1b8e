# SPDX-License-Identifier: Apache-2.0
"""Prompts computed by prefill workers and decoded by others: one router, simulated replicas that speak vLLM's
kv_transfer_params, and scripted ones that fail. Each test has a model of its own."""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

# pytest's importlib mode leaves sys.path alone.
from router_process import RouterProcess
from scripted_engine import Asked, ScriptedEngine, Wire, hang, plain, reset

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.cache.shapes import llama
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.server import ReplicaServer, ServerThread

WAIT_S = 60.0
COMPLETIONS = "/v1/completions"
LONG = 2_048
MODELS = itertools.count()
# A step takes some 5 ms and a long prompt some 50, so that requests overlap.
SLOW = Timing(40_000.0, 0.002, 0.0005)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    folder = tmp_path_factory.mktemp("router")
    # The hand-over itself takes a thousand tokens' time; transfers are for nothing here.
    flags = ["--health-interval-s", "0.2", "--handover-token-cost", "0", "--remote-prefill-min-tokens", "512"]
    with RouterProcess(folder, flags) as process:
        yield process


class Pools:
    """The replicas of one model: `p0`, `p1` and so on only compute prompts, `d0` and so on decode."""

    def __init__(self, router: RouterProcess, stack: ExitStack, name: str) -> None:
        self.router = router
        self._stack = stack
        self.model = name
        self.replicas: dict[str, ReplicaServer] = {}
        self.threads: dict[str, ServerThread] = {}

    def add(self, name: str, timing: Timing = INSTANT) -> ReplicaServer:
        """A simulated replica, registered and heard."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        server = ReplicaServer(llama(), 4_000, context=context, model=self.model, timing=timing)
        self.threads[name] = ServerThread([server])
        self._stack.callback(self.threads[name].stop)
        self.threads[name].start()
        self.replicas[name] = server
        at = server.endpoints
        self.register(name, at["url"], endpoint=at["events"], replay_endpoint=at["replay"], patch_endpoint="off")
        self.router.wait_connected(name)
        return server

    def script(self, name: str, engine: ScriptedEngine, **fields: Any) -> None:
        self._stack.enter_context(engine)
        self.register(name, engine.url, **fields)

    def register(self, name: str, url: str, **fields: Any) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        body = {"worker_id": name, "model": self.model, "url": url, "role": role}
        self.router.request("POST", "/register", body | fields)
        self._stack.callback(self.router.request, "POST", "/unregister", {"worker_id": name})

    def occupy(self, *names: str) -> None:
        """As if much was queued there, so that a hand-over pays, until the end of `free`."""
        for name in names:
            body = {
                "model": self.model,
                "worker_id": name,
                "isl_tokens": 60_000,
                "selection_id": f"{self.model}-{name}",
            }
            self.router.request("POST", "/reservations", body)

    def free(self, *names: str) -> None:
        for name in names:
            self.router.request("DELETE", f"/reservations/{self.model}-{name}")

    def ask(self, prompt: list[int], **fields: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers, and the decoded body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.router.port, timeout=WAIT_S)
        headers = fields.pop("headers", {})
        try:
            body = {"model": self.model, "prompt": prompt, "max_tokens": 4, **fields}
            connection.request("POST", COMPLETIONS, json.dumps(body), headers)
            answer = connection.getresponse()
            whole = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, whole if fields.get("stream") else json.loads(whole)
        finally:
            connection.close()

    def loads(self) -> dict[str, tuple[int, int]]:
        """By worker: prefill tokens that wait, and requests."""
        answer = self.router.request("GET", f"/loads?model_name={self.model}")
        loads = [one for entry in answer for one in entry["loads"]]
        return {one["worker_id"]: (one["potential_prefill_tokens"], one["active_requests"]) for one in loads}

    def hit(self, name: str, prompt: list[int]) -> int:
        answer = self.router.request("POST", "/query", {"model": self.model, "token_ids": prompt})
        return int(answer["instances"][name]["longest_matched"])


@pytest.fixture
def pools(router: RouterProcess) -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(router, stack, f"m{next(MODELS)}")


def tokens(seed: int, count: int = LONG) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 30_000) for _ in range(count)]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {WAIT_S:g} s: {what}"
        time.sleep(0.01)


def outcomes(router: RouterProcess) -> Counter[str]:
    found = Counter[str]()
    for line in router.text("/metrics").splitlines():
        for name in ("kvrouter_handovers_total", "kvrouter_prefill_decisions_total"):
            if line.startswith(name + "{"):
                found[line.partition('outcome="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return found


def cached(answer: Any) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def is_idle(pools: Pools) -> bool:
    return all(load == (0, 0) for load in pools.loads().values())


def test_a_long_prompt_is_computed_here_and_decoded_there(pools: Pools) -> None:
    p0, d0 = pools.add("p0"), pools.add("d0")
    prompt = tokens(1)
    before = outcomes(pools.router)
    pools.occupy("d0")
    status, headers, answer = pools.ask(prompt)
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-prefill-worker"]) == (200, "d0", "p0")
    assert headers["x-kvrouter-predicted-hit"] == "0" and "x-kvrouter-retried" not in headers
    # Nothing of it was known to the prefill worker, and the decode worker received all but the last token.
    assert cached(answer) == 0 and answer["usage"]["completion_tokens"] == 4
    assert p0.api.life.engine.prompt_tokens == d0.api.life.engine.prompt_tokens == LONG
    assert outcomes(pools.router) - before == Counter(remote=1, done=1)
    # The same prefix with a long new part: what the prefill worker had of it is told as cached.
    again = prompt + tokens(2, LONG)
    until(lambda: pools.hit("p0", again) > 0 and pools.hit("d0", again) > 0, "both have told of their blocks")
    predicted = pools.hit("p0", again)
    status, headers, answer = pools.ask(again)
    assert headers["x-kvrouter-prefill-worker"] == "p0"
    assert (int(headers["x-kvrouter-predicted-hit"]), cached(answer)) == (predicted, predicted)
    assert 0 < predicted <= LONG
    # A second turn: nearly all of it is where it was decoded, so that one does it alone.
    turn = again + answer_ids(answer) + tokens(3, 40)
    until(lambda: pools.hit("d0", turn) >= 2 * LONG - 600, "the decode worker has told of its blocks")
    predicted = pools.hit("d0", turn)
    status, headers, answer = pools.ask(turn)
    assert headers["x-kvrouter-worker"] == "d0" and "x-kvrouter-prefill-worker" not in headers
    assert (int(headers["x-kvrouter-predicted-hit"]), cached(answer)) == (predicted, predicted)
    # A short prompt.
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
    asked = {"model": pools.model, "token_ids": tokens(1), "max_tokens": 10, "explain": True}
    answer = pools.router.request("POST", "/select", asked)
    assert (answer["worker_id"], answer["prefill"]["worker_id"]) == ("d0", "p0")
    assert answer["prefill"]["endpoint"] == pools.replicas["p0"].endpoints["url"]
    assert (answer["prefill"]["handover"], answer["prefill"]["effective_prefill_tokens"]) == (
        "kv_transfer_params",
        LONG,
    )
    assert [one["worker_id"] for one in answer["candidates"]] == ["d0"]
    assert [one["worker_id"] for one in answer["prefill"]["candidates"]] == ["p0"]
    answer = pools.router.request("POST", "/select_and_reserve", asked | {"token_ids": tokens(2)})
    assert answer["prefill"]["worker_id"] == "p0"
    assert pools.loads() == {"p0": (LONG, 1), "d0": (busy[0], busy[1] + 1)}
    pools.router.request("POST", f"/reservations/{answer['selection_id']}/prefill_complete")
    assert pools.loads() == {"p0": (0, 0), "d0": (busy[0], busy[1] + 1)}
    pools.router.request("DELETE", f"/reservations/{answer['selection_id']}")
    assert pools.loads() == {"p0": (0, 0), "d0": busy}
    short = pools.router.request("POST", "/select", asked | {"token_ids": tokens(3, 64)})
    assert "prefill" not in short
    pools.free("d0")


def test_a_prefill_worker_that_dies_meanwhile_loses_no_request(pools: Pools) -> None:
    p0, d0 = pools.add("p0"), pools.add("d0")
    pools.occupy("d0")
    before = outcomes(pools.router)
    fault(p0, stall_s=WAIT_S)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(pools.ask, tokens(1))
        until(lambda: p0.api.life.engine.num_running > 0, "the prefill has begun")
        fault(p0, restart=True, down_s=WAIT_S)
        status, headers, answer = asked.result(WAIT_S)
    assert status == 200 and answer["usage"]["completion_tokens"] == 4
    assert headers["x-kvrouter-worker"] == "d0" and "x-kvrouter-prefill-worker" not in headers
    assert headers["x-kvrouter-retried"] in ("p0 reset", "p0 lost")
    assert outcomes(pools.router) - before == Counter(remote=1, failed=1)
    # While it is down nobody is sent there, and that is counted.
    until(lambda: pools.router.worker("p0")["state"] == "down", "its health is seen")
    status, headers, _ = pools.ask(tokens(2))
    assert (status, "x-kvrouter-retried" in headers) == (200, False)
    assert outcomes(pools.router)["unavailable"] == before["unavailable"] + 1
    pools.free("d0")
    until(lambda: is_idle(pools), "no load is left")
    assert d0.api.life.engine.prompt_tokens == 2 * LONG


def fault(server: ReplicaServer, **faults: Any) -> None:
    address = server.endpoints["url"].removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=0.5 if "down_s" in faults else WAIT_S)
    try:
        connection.request("POST", "/sim/faults", json.dumps(faults))
        connection.getresponse().read()
    except TimeoutError:
        # It answers once it is back.
        pass
    finally:
        connection.close()


def test_another_prefill_worker_is_asked_where_the_first_cannot_be_reached(pools: Pools) -> None:
    pools.add("p1")
    pools.add("d0")
    pools.occupy("d0", "p1")
    for attempt in range(2, 12):
        name = f"p{attempt}"
        # It goes between two looks at it; once the router has seen that nobody listens, it is down and not tried at
        # all.
        with socket.create_server(("127.0.0.1", 0)) as gone:
            gone.settimeout(WAIT_S)
            # With an event endpoint, so that the engine is not asked for one.
            at = f"127.0.0.1:{gone.getsockname()[1]}"
            pools.register(name, f"http://{at}", endpoint=f"tcp://{at}", patch_endpoint="off")
            gone.accept()[0].close()
        status, headers, _ = pools.ask(tokens(attempt), max_tokens=2)
        assert status == 200
        if "x-kvrouter-retried" in headers:
            break
    # The one with nothing queued was tried first; it never got the request, so the other one may.
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
    # Which one it will be; then that one dies when it is asked.
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
    # What vLLM answers where kv_load_failure_policy is `fail`, its default.
    fault(d0, fail=1, fail_status=500)
    status, headers, answer = pools.ask(tokens(1))
    assert (status, headers["x-kvrouter-worker"], headers["x-kvrouter-retried"]) == (200, "d0", "d0 gone")
    assert "x-kvrouter-prefill-worker" not in headers and answer["usage"]["completion_tokens"] == 4
    # An engine's own 500 to a prompt that it computed itself stays the client's.
    fault(d0, fail=1, fail_status=500)
    assert pools.ask(tokens(2, 100))[0] == 500
    pools.free("d0")


def test_a_client_that_hangs_up_ends_either_request(pools: Pools) -> None:
    p0, d0 = pools.add("p0", SLOW), pools.add("d0", SLOW)
    pools.occupy("d0")
    body = json.dumps({"model": pools.model, "prompt": tokens(1), "max_tokens": 3_000, "stream": True}).encode()
    request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body)) + body
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
    # Each prefill worker samples one token of each of its prompts, and none of any other.
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


# -- engines that are none of the simulator's

ANSWER = json.dumps({"choices": [], "usage": {"completion_tokens": 1}}).encode()
GIVES = json.dumps({"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1]]}}).encode()


def completions(engine: ScriptedEngine) -> list[Asked]:
    return [asked for asked in engine.asked if asked.target == COMPLETIONS]


@pytest.mark.parametrize(
    ("script", "outcome", "retried"),
    [
        (plain(ANSWER), "declined", None),
        (plain(b'{"kv_transfer_params": null}'), "declined", None),
        (plain(b"no JSON"), "declined", None),
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


def test_the_two_requests_say_what_vllm_wants(pools: Pools) -> None:
    prefill, decode = ScriptedEngine(plain(GIVES)), ScriptedEngine(plain(ANSWER))
    pools.script("p0", prefill)
    pools.script("d0", decode)
    pools.occupy("d0")
    sent = {"min_tokens": 3, "logprobs": 2, "temperature": 0.5, "stream": False, "stream_options": None, "seed": 7}
    names = {"x-request-id": "mine", "x-prefiller-host-port": "evil:1", "accept-encoding": "gzip"}
    assert pools.ask(tokens(1), headers=names, **sent)[0] == 200
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
    given = json.loads(GIVES)["kv_transfer_params"]
    assert json.loads(second.body) == {
        "model": pools.model,
        "prompt": tokens(1),
        "max_tokens": 4,
        **sent,
        "kv_transfer_params": given,
    }
    assert first.all("x-request-id") == second.all("x-request-id") == ["mine"]
    assert not first.all("x-prefiller-host-port") and not second.all("x-prefiller-host-port")
    assert (first.all("accept-encoding"), second.all("accept-encoding")) == ([], ["gzip"])
    pools.free("d0")


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}, {"max_tokens": 1}, {"kv_transfer_params": {"a": 1}}])
def test_what_cannot_be_handed_over_goes_on_as_it_came(pools: Pools, fields: dict[str, Any]) -> None:
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


def test_a_sidecar_is_told_where_the_prompt_is_to_be_computed(pools: Pools) -> None:
    async def sidecar(asked: Asked, wire: Wire) -> None:
        """As llm-d's: what it does not get from the prefill worker is its own error."""
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
        asked = pool.submit(pools.ask, tokens(1))
        until(lambda: bool(completions(prefill)), "it is asked")
        prefill.healthy = False
        status, headers, _ = asked.result(WAIT_S)
    assert (status, headers["x-kvrouter-retried"]) == (200, "p0 lost")
    pools.free("d0")
