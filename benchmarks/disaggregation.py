# SPDX-License-Identifier: Apache-2.0
"""Claim: with long prompts among running answers, prefill and decode workers keep the pauses within answers short.

    python -m benchmarks.disaggregation [--seconds N] [--rate R] [--prompt-tokens N]

The same number of simulated replicas in real time (`simulator/engine/timing.py`: an 8 B model on an H100) either all do
both, or half of them do each. Requests come at random times; each has a fresh prompt, and streams its answer through a
`kvrouter serve` with default settings. The table shows the time to the first token, the pauses between two tokens, and
the longest pause of each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import zmq

from benchmarks.report import parser_of, percentile, print_setting
from kvrouter.simulator.cache.shapes import llama
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.router_process import RouterProcess

MODEL = "m"
FLEETS = {"4 both": ("both",) * 4, "2 prefill, 2 decode": ("prefill", "prefill", "decode", "decode")}


class Watched:
    """The times that clients saw, in seconds."""

    def __init__(self) -> None:
        self.first_s: list[float] = []
        self.pauses_s: list[float] = []
        self.longest_s: list[float] = []
        self.computed_at: Counter[str] = Counter()


async def stream_prompt(session: aiohttp.ClientSession, prompt: list[int], answer_tokens: int, seen: Watched) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": answer_tokens, "stream": True}
    began_s = time.perf_counter()
    async with session.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        seen.computed_at["elsewhere" if "x-kvrouter-prefill-worker" in answer.headers else "where it is decoded"] += 1
        last_s = longest_s = 0.0
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            if last_s:
                seen.pauses_s.append(now_s - last_s)
                longest_s = max(longest_s, now_s - last_s)
            else:
                seen.first_s.append(now_s - began_s)
            last_s = now_s
        seen.longest_s.append(longest_s)


async def drive(url: str, given: argparse.Namespace) -> Watched:
    rng, seen = random.Random(1), Watched()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session, asyncio.TaskGroup() as group:
        due_s, end_s = time.perf_counter(), time.perf_counter() + given.seconds
        while due_s < end_s:
            prompt = [rng.randrange(300, 30_000) for _ in range(given.prompt_tokens)]
            group.create_task(stream_prompt(session, prompt, given.answer_tokens, seen))
            due_s += rng.expovariate(given.rate)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    return seen


def run(roles: tuple[str, ...], given: argparse.Namespace) -> Watched:
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        servers = [
            ReplicaServer(
                llama(), 60_000, context=context, model=MODEL, timing=Timing(), chunk_tokens=given.chunk_tokens
            )
            for _ in roles
        ]
        thread = ServerThread(servers)
        stack.callback(thread.stop)
        thread.start()
        router = stack.enter_context(RouterProcess(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        for number, (server, role) in enumerate(zip(servers, roles, strict=True)):
            at, name = server.endpoints, f"w{number}"
            body = {"worker_id": name, "model": MODEL, "url": at["url"], "endpoint": at["events"], "role": role}
            router.request("POST", "/register", body | {"replay_endpoint": at["replay"], "patch_endpoint": "off"})
            router.wait_connected(name)
        return asyncio.run(drive(f"http://127.0.0.1:{router.port}", given))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=8_000)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--chunk-tokens", type=int, default=8_192, help="vLLM's max_num_batched_tokens on an H100")
    arguments = parser.parse_args()
    print_setting()
    print(
        "| replicas | requests | prompt computed elsewhere | TTFT p50, ms | p95 | pause p50, ms | p99.9 "
        "| longest of an answer p50, ms | p95 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, roles in FLEETS.items():
        seen = run(roles, arguments)
        count = sum(seen.computed_at.values())
        first = f"{1000 * percentile(seen.first_s, 0.5):.0f} | {1000 * percentile(seen.first_s, 0.95):.0f}"
        pauses = " | ".join(f"{1000 * percentile(seen.pauses_s, share):.0f}" for share in (0.5, 0.999))
        longest = f"{1000 * percentile(seen.longest_s, 0.5):.0f} | {1000 * percentile(seen.longest_s, 0.95):.0f}"
        print(f"| {name} | {count} | {seen.computed_at['elsewhere']} | {first} | {pauses} | {longest} |", flush=True)


if __name__ == "__main__":
    main()
