# SPDX-License-Identifier: Apache-2.0
"""The time that the proxy adds to a request, and how many requests a core takes, beside vllm-router.

Two stub engines answer at once. The same client sends its requests to one of them directly, and through
`kvrouter serve` (kv with an engine's render endpoint, kv with a tokenizer of its own, round_robin) and vllm-router
(cache_aware, and kv_aware with the same events). Prompts are 256, 4,096 and 32,768 tokens: ids of a completion, or the
text of a chat.

- One connection, in turns whose order changes from round to round: the time added to the same request sent directly, at
  the median and at the 99th percentile. No prompt comes twice.
- 64 connections, 512 prompts: requests for each second of the router's CPU (its own, and its Valkey's), and the latency
  of a request then; the client and the engines run on the same machine.
- Streams of 32 chunks: the time added until the first byte, the time added to each chunk, and the router's CPU for a
  chunk.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.http_client import TIMEOUT_S, HttpClient
from benchmarks.peers.packages import environment
from benchmarks.processes import cpu_s
from benchmarks.proxy_stub import CHUNKS
from benchmarks.proxy_ways import DIRECT, NAMES, load_now, ways
from benchmarks.report import Others, Result, finish, machine, markdown, parser_of, percentile, progress, scratch
from benchmarks.workload import MODEL

SIZES = (256, 4_096, 32_768)
KINDS = ("ids", "text")
CONNECTIONS = 64
WARM_REQUESTS = 10
# The requests of each size in a round, over one connection.
COUNTS = {256: 400, 4_096: 200, 32_768: 60}
# Fewer for texts, as a text is tokenized each time, in tens of milliseconds for the longest.
TEXT_COUNTS = {256: 300, 4_096: 80, 32_768: 15}
STREAMS = 12
# The figures of a row that are taken in every round.
FIGURES = ("added_p50_us", "added_p99_us", "requests_per_cpu_s", "requests_per_s", "p50_64_ms", "p99_64_ms")
SENT_NS = re.compile(rb'"sent_ns":(\d+)')


class ProxyRow(msgspec.Struct):
    """One router, kind and size of prompt: the medians of the rounds, which are in `rounds`."""

    router: str
    kind: str
    tokens: int
    # Added to the same request sent directly.
    added_p50_us: float
    added_p99_us: float
    # Over 64 connections; p50 and p99 there are of whole requests.
    requests_per_cpu_s: float
    requests_per_s: float
    p50_64_ms: float
    p99_64_ms: float
    rounds: dict[str, list[float]]


class StreamRow(msgspec.Struct):
    """One router: the time that it adds to a stream, in us."""

    router: str
    # Added until the first chunk.
    added_first_p50_us: float
    # Added to each chunk after the first.
    added_chunk_p50_us: float
    added_chunk_p99_us: float
    # The router's CPU for a chunk, the request included.
    cpu_per_chunk_us: float


class Found(msgspec.Struct):
    requests: list[ProxyRow]
    streams: list[StreamRow]
    load: list[float]


class Prompts:
    """Bodies of requests that share a beginning of half their length, no two alike."""

    def __init__(self, kind: str, tokens: int) -> None:
        self._kind, self._rng = kind, np.random.default_rng(tokens)
        self._common = self._rng.integers(10, 100_000, tokens // 2).tolist()
        self._own = tokens - len(self._common)
        self._path = "/v1/completions" if kind == "ids" else "/v1/chat/completions"

    def body(self, *, stream: bool = False) -> bytes:
        ids = [*self._common, *self._rng.integers(10, 100_000, self._own).tolist()]
        if self._kind == "ids":
            prompt: dict[str, object] = {"prompt": ids}
        else:
            # Each of these words has four tokens in the tokenizer used here, so a quarter as many words are needed.
            text = " ".join(f"{token % 997:03d}" for token in ids[::4])
            prompt = {"messages": [{"role": "user", "content": text}]}
        more = {"max_tokens": CHUNKS, "stream": True} if stream else {"max_tokens": 1}
        return json.dumps({"model": MODEL} | prompt | more).encode()

    def request(self, port: int, *, stream: bool = False) -> bytes:
        body = self.body(stream=stream)
        head = f"POST {self._path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def timed(client: HttpClient, request: bytes) -> float:
    """Send a request and return the seconds until its answer was read."""
    began = time.perf_counter()
    status, answer = client.send(request)
    taken = time.perf_counter() - began
    if status != 200:
        raise RuntimeError(f"{status}: {answer[:300]!r}")
    return taken


def check(ports: dict[str, int]) -> None:
    """Raise AssertionError unless the same request gives the engine's own answer through every router."""
    body = Prompts("ids", SIZES[0]).body()
    answers = {}
    for name, port in ports.items():
        client = HttpClient(port)
        answers[name] = client.call("POST", "/v1/completions", json.loads(body))
        client.close()
    for name, answer in answers.items():
        if answer != answers[DIRECT]:
            raise AssertionError(f"{name} answers {answer}, the engine {answers[DIRECT]}")


def latencies(ports: dict[str, int], prompts: Prompts, count: int, order: Sequence[str]) -> dict[str, list[float]]:
    """Return the times of each way in seconds; the ways take turns, so that disturbances hit all alike."""
    clients = {name: HttpClient(ports[name]) for name in order}
    times: dict[str, list[float]] = {name: [] for name in order}
    for n in range(count + WARM_REQUESTS):
        for name in order:
            taken = timed(clients[name], prompts.request(ports[name]))
            if n >= WARM_REQUESTS:
                times[name].append(taken)
    for client in clients.values():
        client.close()
    return {name: sorted(way_times) for name, way_times in times.items()}


def added_us(times: Sequence[float], direct: Sequence[float]) -> tuple[float, float]:
    """Return what is added to the times of the direct way, at the median and at the 99th percentile."""
    median_us, late_us = ((percentile(times, share) - percentile(direct, share)) * 1e6 for share in (0.5, 0.99))
    return median_us, late_us


class Crowd(NamedTuple):
    """The requests over many connections at once."""

    times_s: list[float]
    lasted_s: float
    # The CPU that each of the processes used, in seconds.
    used_s: list[float]


def crowd(port: int, pids: Sequence[int | None], prompts: Prompts, connections: int, seconds: float) -> Crowd:
    """Send requests over many connections at once."""
    # Make the requests beforehand, else the client would be measured.
    requests = [[prompts.request(port) for _ in range(8)] for _ in range(connections)]
    taken: list[list[float]] = [[] for _ in range(connections)]
    until = time.monotonic() + seconds

    def ask(number: int) -> None:
        client = HttpClient(port)
        while time.monotonic() < until:
            taken[number].append(timed(client, requests[number][len(taken[number]) % 8]))
        client.close()

    before, began = [used_cpu_s(pid) for pid in pids], time.monotonic()
    with ThreadPoolExecutor(connections) as threads:
        list(threads.map(ask, range(connections)))
    used = [used_cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    return Crowd([time_s for times in taken for time_s in times], time.monotonic() - began, used)


def used_cpu_s(pid: int | None) -> float:
    """Return the CPU that a process has used; 0 where a way has no such process."""
    return 0.0 if pid is None else cpu_s(pid)


def streamed(port: int, request: bytes) -> tuple[float, list[float]]:
    """Return the seconds to the first chunk, and the seconds from the sending of each further chunk to its arrival."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic_ns()
        connection.sendall(request)
        first, later, received_tail = 0.0, list[float](), b""
        while b"[DONE]" not in received_tail:
            data = connection.recv(65_536)
            now = time.monotonic_ns()
            if not data:
                raise ConnectionError("the stream broke off")
            for sent in SENT_NS.findall(data):
                if not first:
                    first = (now - began) / 1e9
                else:
                    later.append((now - int(sent)) / 1e9)
            received_tail = received_tail[-16:] + data
        return first, later


class StreamTimes(NamedTuple):
    """The seconds to the first chunks of a way's streams, of their later chunks, and the router's CPU for a chunk."""

    first_s: list[float]
    later_s: list[float]
    cpu_per_chunk_s: float


def stream_times(ports: Mapping[str, int], pids: Mapping[str, int], rounds: int) -> dict[str, StreamTimes]:
    """Measure streams through every way; the pids are those of the routers, of the ways that have one."""
    prompts = Prompts("ids", 256)
    times = {name: StreamTimes([], [], 0.0) for name in ports}
    for turn in range(rounds):
        for name in ordered(ports, turn):
            way = times[name]
            before = used_cpu_s(pids.get(name))
            for _ in range(STREAMS):
                first, later = streamed(ports[name], prompts.request(ports[name], stream=True))
                way.first_s.append(first)
                way.later_s.extend(later)
            per_chunk_s = (used_cpu_s(pids.get(name)) - before) / (STREAMS * rounds * CHUNKS)
            times[name] = way._replace(cpu_per_chunk_s=way.cpu_per_chunk_s + per_chunk_s)
    return times


def stream_rows(times: Mapping[str, StreamTimes]) -> list[StreamRow]:
    direct = times[DIRECT]
    return [
        StreamRow(
            name,
            added_us(way.first_s, direct.first_s)[0],
            *added_us(way.later_s, direct.later_s),
            way.cpu_per_chunk_s * 1e6,
        )
        for name, way in times.items()
        if name != DIRECT
    ]


def ordered(ports: Mapping[str, int], turn: int) -> list[str]:
    """Return the names in the order of this round, so that another one goes first in each round."""
    names = list(ports)
    return names[turn % len(names) :] + names[: turn % len(names)]


def measure(
    folder: Path,
    vllm_router: Sequence[str],
    *,
    quick: bool,
    names: Sequence[str] = NAMES,
    kinds: Sequence[str] = KINDS,
) -> tuple[Found, list[str]]:
    found, notes = Found([], [], [load_now()]), list[str]()
    rounds = 1 if quick else 3
    with ways(folder, vllm_router, names) as (ports, pids):
        check(ports)
        for kind in kinds:
            for tokens in SIZES:
                counts = COUNTS if kind == "ids" else TEXT_COUNTS
                count = max(5, counts[tokens] // 10) if quick else counts[tokens]
                seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in pids}
                direct_us: list[float] = []
                for turn in range(rounds):
                    progress(f"proxy: {tokens} tokens, {kind}, round {turn + 1}")
                    prompts, order = Prompts(kind, tokens), ordered(ports, turn)
                    times = latencies(ports, prompts, count, order)
                    direct_us.append(percentile(times[DIRECT], 0.5) * 1e6)
                    for name in (name for name in order if name in pids):
                        added = added_us(times[name], times[DIRECT])
                        many = crowd(ports[name], [pids[name]], prompts, CONNECTIONS, 0.5 if quick else 1.5)
                        rates = (len(many.times_s) / spent_s for spent_s in (*many.used_s, many.lasted_s))
                        whole_ms = (percentile(many.times_s, share) * 1e3 for share in (0.5, 0.99))
                        seen[name].append((*added, *rates, *whole_ms))
                    found.load.append(load_now())
                notes.append(f"{tokens} tokens as {kind}: {statistics.median(direct_us):.0f} us directly")
                for name, figures in seen.items():
                    values = dict(zip(FIGURES, map(list, zip(*figures, strict=True)), strict=True))
                    medians = {figure: statistics.median(of_rounds) for figure, of_rounds in values.items()}
                    found.requests.append(ProxyRow(name, kind, tokens, **medians, rounds=values))
        progress("proxy: streams")
        found.streams = stream_rows(stream_times(ports, pids, rounds))
    loads = f"{min(found.load):.1f} to {max(found.load):.1f}"
    notes.append(f"load average while it ran, the benchmark's own included: {loads}")
    return found, notes


def tables(found: Found) -> str:
    lines = [
        [
            "prompt",
            "router",
            "adds p50, us",
            "p99, us",
            "requests a CPU second",
            "requests/s, 64 conn.",
            "p50, ms",
            "p99, ms",
        ]
    ]
    for row in found.requests:
        whole = (row.added_p50_us, row.added_p99_us, row.requests_per_cpu_s, row.requests_per_s)
        fine = (row.p50_64_ms, row.p99_64_ms)
        numbers = [*(f"{number:,.0f}" for number in whole), *(f"{number:.1f}" for number in fine)]
        lines.append([f"{row.tokens:,} tokens, {row.kind}", row.router, *numbers])
    of_streams = [["router", "first chunk, us", "each chunk p50, us", "p99, us", "CPU a chunk, us"]]
    for stream in found.streams:
        values = (
            stream.added_first_p50_us, stream.added_chunk_p50_us, stream.added_chunk_p99_us, stream.cpu_per_chunk_us,
        )  # fmt: skip
        of_streams.append([stream.router, *(f"{value:,.0f}" for value in values)])
    return f"{markdown(lines)}\n\n{markdown(of_streams)}"


def main() -> None:
    parser = parser_of(__doc__, quick=True, result=True)
    arguments = parser.parse_args()
    vllm_router = environment("vllm-router")
    about = machine()
    others = Others()
    with scratch() as folder:
        found, notes = measure(folder, vllm_router.command("vllm-router"), quick=arguments.quick)
    notes.append(others.note())
    if vllm_router.problem:
        notes.append(f"vllm-router is not measured: {vllm_router.problem}")
    finish(Result("proxy_overhead", arguments.quick, about, [found], notes), arguments.json, tables(found))
    print("- " + "; ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
