# SPDX-License-Identifier: Apache-2.0
"""The prefill and decode workers of one model behind a router, simulated or scripted, and requests to them."""

from __future__ import annotations

import http.client
import itertools
import json
import random
from collections import Counter
from contextlib import ExitStack
from typing import Any

import zmq

from kvrouter.simulator.cache.shapes import llama
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.exchange import exchange
from tests.support.router_process import RouterProcess
from tests.support.scripted_engine import ScriptedEngine

WAIT_S = 60.0
COMPLETIONS = "/v1/completions"
LONG = 2_048
MODELS = itertools.count()
# A hand-over has a fixed cost of about a thousand tokens; the transfer of the tokens costs nothing here.
POOL_FLAGS = ("--health-interval-s", "0.2", "--handover-token-cost", "0", "--remote-prefill-min-tokens", "512")


class Pools:
    """The replicas of one model: `p0`, `p1` and so on only compute prompts, `d0` and so on decode."""

    def __init__(self, router: RouterProcess, stack: ExitStack, name: str) -> None:
        self.router = router
        self._stack = stack
        self.model = name
        self.replicas: dict[str, ReplicaServer] = {}
        self.threads: dict[str, ServerThread] = {}

    def add(self, name: str, timing: Timing = INSTANT) -> ReplicaServer:
        """Start a simulated replica, register it, and wait until the router follows its events."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        server = ReplicaServer(llama(), 4_000, context=context, model=self.model, timing=timing)
        self.threads[name] = ServerThread([server])
        self._stack.callback(self.threads[name].stop)
        self.threads[name].start()
        self.replicas[name] = server
        endpoints = server.endpoints
        self.register(
            name,
            endpoints["url"],
            endpoint=endpoints["events"],
            replay_endpoint=endpoints["replay"],
            patch_endpoint="off",
        )
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
        """Reserve many tokens on these workers until `free`, so that a hand-over pays."""
        for name in names:
            occupy(self.router, self.model, name)

    def free(self, *names: str) -> None:
        for name in names:
            self.router.request("DELETE", f"/reservations/{self.model}-{name}")

    def ask(self, prompt: list[int], **fields: Any) -> tuple[int, dict[str, str], Any]:
        """Send a completion to the router; return the status, the headers, and the decoded body."""
        headers = fields.pop("headers", {})
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, **fields}
        answer = exchange(self.router.port, "POST", COMPLETIONS, body, headers)
        return answer.status, answer.headers, answer.content if fields.get("stream") else answer.json()

    def loads(self) -> dict[str, tuple[int, int]]:
        """Return the waiting prefill tokens and the number of requests of each worker."""
        answer = self.router.request("GET", f"/loads?model_name={self.model}")
        loads = [load for entry in answer for load in entry["loads"]]
        return {load["worker_id"]: (load["potential_prefill_tokens"], load["active_requests"]) for load in loads}

    def hit(self, name: str, prompt: list[int]) -> int:
        answer = self.router.request("POST", "/query", {"model": self.model, "token_ids": prompt})
        return int(answer["instances"][name]["longest_matched"])


def occupy(router: RouterProcess, model: str, name: str) -> None:
    """Reserve 60,000 tokens on a worker, so that a hand-over to another worker pays."""
    body = {"model": model, "worker_id": name, "isl_tokens": 60_000, "selection_id": f"{model}-{name}"}
    router.request("POST", "/reservations", body)


def tokens(seed: int, count: int = LONG) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 30_000) for _ in range(count)]


def outcomes(router: RouterProcess) -> Counter[str]:
    counts = Counter[str]()
    for line in router.text("/metrics").splitlines():
        for name in ("kvrouter_handovers_total", "kvrouter_prefill_decisions_total"):
            if line.startswith(name + "{"):
                counts[line.partition('outcome="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return counts


def cached(answer: Any) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def is_idle(pools: Pools) -> bool:
    return all(load == (0, 0) for load in pools.loads().values())


def fault(server: ReplicaServer, **faults: Any) -> None:
    address = server.endpoints["url"].removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=0.5 if "down_s" in faults else WAIT_S)
    try:
        connection.request("POST", "/sim/faults", json.dumps(faults))
        connection.getresponse().read()
    except TimeoutError:
        # The engine answers only when its downtime is over.
        pass
    finally:
        connection.close()
