# SPDX-License-Identifier: Apache-2.0
"""The time that an endpoint picker adds to a request behind a gateway, beside the gateway alone and the router's proxy.

Two stub engines answer at once (`proxy_stub.py`). The same client sends its requests to one of them directly; through
Envoy with round robin; through Envoy with the picker, with bodies in FULL_DUPLEX_STREAMED and in BUFFERED and STREAMED;
and through the router's proxy. One router serves as picker and as proxy, so that index and settings are the same.
Prompts are token ids of a completion, no two alike; bodies are made beforehand.

- One connection, each way in turn: the time added to the same request sent directly.
- 16 connections: requests for each second of CPU of the router and of Envoy.
- Streams of 32 chunks: the time added to the first chunk and to each chunk, and the router's CPU for a chunk.
- The cost of the gRPC server to users who do not use it: requests a CPU second of the proxy, without and with
  `gateway_port`.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from benchmarks.processes import cpu_s, serving
from benchmarks.proxy_overhead import CHUNKS, Prompts, at, ordered, streamed
from benchmarks.proxy_ways import load_now
from benchmarks.report import Others, Result, machine, markdown, progress, save
from benchmarks.workload import MODEL
from tests.support.envoy_process import BUFFERED, ROUND_ROBIN, EnvoyProcess
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

SIZES = (256, 4_096, 32_768)
COUNTS = {256: 300, 4_096: 150, 32_768: 40}
CONNECTIONS = 16
STREAMS = 12
DIRECT, PROXY, PROXY_ALONE = "direct", "kvrouter proxy", "kvrouter proxy, no gateway_port"
ENVOY, DUPLEX, HELD = "Envoy round robin", "Envoy + picker", "Envoy + picker, BUFFERED"
TIMEOUT_S = 30.0


class Row(msgspec.Struct):
    """One way and size of prompt; each figure is the median of the rounds."""

    way: str
    tokens: int
    # Added to the same request sent directly.
    added_p50_us: float
    added_p99_us: float
    # CPU time of the router and of Envoy for a request, with CONNECTIONS requests at once.
    router_cpu_us: float
    envoy_cpu_us: float
    requests_per_s: float


class StreamRow(msgspec.Struct):
    """One way's figures for streams, in us."""

    way: str
    # Added to the first chunk, and to each chunk after it.
    added_first_us: float
    added_chunk_us: float
    # CPU time of the router for a chunk.
    router_cpu_us: float


class Found(msgspec.Struct):
    requests: list[Row]
    streams: list[StreamRow]
    load: list[float]


class Client:
    """A client with one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def timed(self, body: bytes) -> float:
        """Send a request and return the seconds until its answer was read."""
        began = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        taken = time.perf_counter() - began
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:300]!r}")
        return taken

    def close(self) -> None:
        self._connection.close()


class Ways(msgspec.Struct):
    """The ports of all ways, and the process ids of the router and of the Envoy behind each way that has them."""

    ports: dict[str, int]
    routers: dict[str, int]
    envoys: dict[str, int]


@contextmanager
def ways(folder: Path) -> Iterator[Ways]:
    with ExitStack() as stack:
        engines = [free_port(), free_port()]
        for port in engines:
            command = [sys.executable, "-m", "benchmarks.proxy_stub", str(port)]
            stack.enter_context(serving(command, port, folder / "stub.log"))
        urls = [f"http://127.0.0.1:{port}" for port in engines]
        workers = [part for n, url in enumerate(urls) for part in ("--worker", f"w{n}={url},model={MODEL}")]
        gateway_port = free_port()
        flags = [*workers, "--health-interval-s", "0"]
        router = stack.enter_context(RouterProcess(folder / "r", ["--gateway-port", str(gateway_port), *flags]))
        alone = stack.enter_context(RouterProcess(folder / "alone", flags))
        envoys = {
            ENVOY: EnvoyProcess(folder / "rr", urls, picker_port=None, how=ROUND_ROBIN),
            DUPLEX: EnvoyProcess(folder / "duplex", urls, picker_port=gateway_port),
            HELD: EnvoyProcess(folder / "buffered", urls, picker_port=gateway_port, processing=BUFFERED),
        }
        for envoy in envoys.values():
            stack.enter_context(envoy)
        ports = {DIRECT: engines[0], PROXY: router.port, PROXY_ALONE: alone.port}
        yield Ways(
            ports | {name: envoy.port for name, envoy in envoys.items()},
            {PROXY: router.pid, PROXY_ALONE: alone.pid, DUPLEX: router.pid, HELD: router.pid},
            {name: envoy.pid for name, envoy in envoys.items()},
        )


def latencies(found: Ways, prompts: Prompts, count: int, order: Sequence[str]) -> dict[str, list[float]]:
    """Return the sorted times of each way in seconds; the ways take turns, so that disturbances hit all alike."""
    clients = {name: Client(found.ports[name]) for name in order}
    times: dict[str, list[float]] = {name: [] for name in order}
    for n in range(count + 10):
        for name in order:
            taken = clients[name].timed(prompts.body())
            if n >= 10:
                times[name].append(taken)
    for client in clients.values():
        client.close()
    return {name: sorted(way_times) for name, way_times in times.items()}


def throughput(found: Ways, name: str, prompts: Prompts, seconds: float) -> tuple[float, float, float]:
    """Return the CPU of the router and of Envoy for a request in us, and requests/s, over CONNECTIONS connections."""
    bodies = [[prompts.body() for _ in range(8)] for _ in range(CONNECTIONS)]
    counts = [0] * CONNECTIONS
    until = time.monotonic() + seconds

    def ask(number: int) -> None:
        client = Client(found.ports[name])
        while time.monotonic() < until:
            client.timed(bodies[number][counts[number] % 8])
            counts[number] += 1
        client.close()

    pids = [found.routers.get(name), found.envoys.get(name)]
    before = [0.0 if pid is None else cpu_s(pid) for pid in pids]
    began = time.monotonic()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lasted, served = time.monotonic() - began, sum(counts)
    used = [0.0 if pid is None else cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    return used[0] / served * 1e6, used[1] / served * 1e6, served / lasted


def requests(found: Ways, rounds: int, *, quick: bool) -> list[Row]:
    rows = []
    for tokens in SIZES:
        seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in found.ports if name != DIRECT}
        for turn in range(rounds):
            progress(f"gateway: {tokens} tokens, round {turn + 1}")
            prompts = Prompts("ids", tokens)
            count = max(20, COUNTS[tokens] // 10) if quick else COUNTS[tokens]
            times = latencies(found, prompts, count, ordered(found.ports, turn))
            for name, figures in seen.items():
                added = [(at(times[name], share) - at(times[DIRECT], share)) * 1e6 for share in (0.5, 0.99)]
                figures.append((*added, *throughput(found, name, prompts, 0.7 if quick else 1.2)))
        for name, figures in seen.items():
            rows.append(Row(name, tokens, *(statistics.median(values) for values in zip(*figures, strict=True))))
    return rows


def stream_rows(found: Ways, rounds: int) -> list[StreamRow]:
    prompts = Prompts("ids", 256)
    firsts: dict[str, list[float]] = {name: [] for name in found.ports}
    lates: dict[str, list[float]] = {name: [] for name in found.ports}
    used: dict[str, float] = dict.fromkeys(found.ports, 0.0)
    for turn in range(rounds):
        for name in ordered(found.ports, turn):
            pid = found.routers.get(name)
            before = 0.0 if pid is None else cpu_s(pid)
            for _ in range(STREAMS):
                first, late = streamed(found.ports[name], prompts.request(found.ports[name], stream=True))
                firsts[name].append(first)
                lates[name] += late
            used[name] += 0.0 if pid is None else cpu_s(pid) - before

    def p50(times: Mapping[str, list[float]], name: str) -> float:
        return statistics.median(times[name]) * 1e6

    return [
        StreamRow(
            name,
            p50(firsts, name) - p50(firsts, DIRECT),
            p50(lates, name) - p50(lates, DIRECT),
            used[name] / (STREAMS * rounds * CHUNKS) * 1e6,
        )
        for name in found.ports
        if name != DIRECT
    ]


def tables(found: Found) -> str:
    lines = [["prompt", "way", "adds p50, us", "p99, us", "router CPU, us", "Envoy CPU, us", "requests/s, 16 conn."]]
    for row in found.requests:
        numbers = (row.added_p50_us, row.added_p99_us, row.router_cpu_us, row.envoy_cpu_us, row.requests_per_s)
        lines.append([f"{row.tokens:,} tokens", row.way, *(f"{number:,.0f}" for number in numbers)])
    of_streams = [["stream through", "first chunk, us", "each chunk, us", "router CPU a chunk, us"]]
    for stream in found.streams:
        values = (stream.added_first_us, stream.added_chunk_us, stream.router_cpu_us)
        of_streams.append([stream.way, *(f"{value:,.0f}" for value in values)])
    return f"{markdown(lines)}\n\n{markdown(of_streams)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    arguments = parser.parse_args()
    about, others, rounds = machine(), Others(), 1 if arguments.quick else 3
    result = Found([], [], [load_now()])
    with tempfile.TemporaryDirectory(prefix="kvr-bench-", dir="/tmp") as folder, ways(Path(folder)) as running:
        result.requests = requests(running, rounds, quick=arguments.quick)
        progress("gateway: streams")
        result.streams = stream_rows(running, rounds)
        result.load.append(load_now())
    notes = [others.note(), f"load average before and after: {result.load[0]:.1f}, {result.load[-1]:.1f}"]
    save(Result("gateway_overhead", arguments.quick, about, [result], notes), arguments.json)
    print(tables(result))
    for note in notes:
        print(f"- {note}")
    print("- " + "; ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
