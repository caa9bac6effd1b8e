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

import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from benchmarks.processes import serving
from benchmarks.proxy_overhead import Prompts, StreamRow, added_us, crowd, latencies, ordered, stream_rows, stream_times
from benchmarks.proxy_ways import load_now
from benchmarks.report import Others, Result, finish, machine, markdown, parser_of, progress, scratch
from benchmarks.workload import MODEL
from tests.support.envoy_process import BUFFERED, ROUND_ROBIN, EnvoyProcess
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

SIZES = (256, 4_096, 32_768)
COUNTS = {256: 300, 4_096: 150, 32_768: 40}
CONNECTIONS = 16
DIRECT, PROXY, PROXY_ALONE = "direct", "kvrouter proxy", "kvrouter proxy, no gateway_port"
ENVOY, DUPLEX, HELD = "Envoy round robin", "Envoy + picker", "Envoy + picker, BUFFERED"


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


class Found(msgspec.Struct):
    requests: list[Row]
    streams: list[StreamRow]
    load: list[float]


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


def requests(found: Ways, rounds: int, *, quick: bool) -> list[Row]:
    rows = []
    for tokens in SIZES:
        seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in found.ports if name != DIRECT}
        for turn in range(rounds):
            progress(f"gateway: {tokens} tokens, round {turn + 1}")
            prompts = Prompts("ids", tokens)
            count = max(20, COUNTS[tokens] // 10) if quick else COUNTS[tokens]
            times = latencies(found.ports, prompts, count, ordered(found.ports, turn))
            for name, figures in seen.items():
                pids = [found.routers.get(name), found.envoys.get(name)]
                many = crowd(found.ports[name], pids, prompts, CONNECTIONS, 0.7 if quick else 1.2)
                count_served = len(many.times_s)
                used_us = (used_s / count_served * 1e6 for used_s in many.used_s)
                added = added_us(times[name], times[DIRECT])
                figures.append((*added, *used_us, count_served / many.lasted_s))
        for name, figures in seen.items():
            rows.append(Row(name, tokens, *(statistics.median(values) for values in zip(*figures, strict=True))))
    return rows


def tables(found: Found) -> str:
    lines = [["prompt", "way", "adds p50, us", "p99, us", "router CPU, us", "Envoy CPU, us", "requests/s, 16 conn."]]
    for row in found.requests:
        numbers = (row.added_p50_us, row.added_p99_us, row.router_cpu_us, row.envoy_cpu_us, row.requests_per_s)
        lines.append([f"{row.tokens:,} tokens", row.way, *(f"{number:,.0f}" for number in numbers)])
    of_streams = [["stream through", "first chunk, us", "each chunk, us", "router CPU a chunk, us"]]
    for stream in found.streams:
        values = (stream.added_first_p50_us, stream.added_chunk_p50_us, stream.cpu_per_chunk_us)
        of_streams.append([stream.router, *(f"{value:,.0f}" for value in values)])
    return f"{markdown(lines)}\n\n{markdown(of_streams)}"


def main() -> None:
    parser = parser_of(__doc__, quick=True, result=True)
    arguments = parser.parse_args()
    about, others, rounds = machine(), Others(), 1 if arguments.quick else 3
    result = Found([], [], [load_now()])
    with scratch() as folder, ways(folder) as running:
        result.requests = requests(running, rounds, quick=arguments.quick)
        progress("gateway: streams")
        result.streams = stream_rows(stream_times(running.ports, running.routers, rounds))
        result.load.append(load_now())
    notes = [others.note(), f"load average before and after: {result.load[0]:.1f}, {result.load[-1]:.1f}"]
    finish(Result("gateway_overhead", arguments.quick, about, [result], notes), arguments.json, tables(result))
    print("- " + "; ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
