# SPDX-License-Identifier: Apache-2.0
"""The time that a proxied request takes with another version of the router and with this one, in turns.

Routers of both versions, and a second one of this version as a control, run at the same time in front of the same two
stub engines with the same events. One client sends each request through all of them, one after the other, and begins
with a different router each time. A row is the difference, request by request, from the router of the other version: its
median, with the quartiles of the rounds' medians. This version is as fast as the other one if its row is no further from
zero than the row of the control.

The other version is a clone with its own .venv:

    git clone . /tmp/before && cd /tmp/before && git checkout COMMIT && make .venv/installed
    .venv/bin/python -m benchmarks.proxy_before --other /tmp/before/.venv/bin/python
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from benchmarks.http_client import HttpClient
from benchmarks.processes import cpu_s
from benchmarks.proxy_overhead import CONNECTIONS, WARM_REQUESTS, Prompts, check, crowd, ordered, streamed, timed
from benchmarks.proxy_ways import load_now, ways
from benchmarks.report import Others, Result, finish, machine, markdown, parser_of, progress, scratch

BEFORE, NOW, CONTROL = "before", "now", "now, again"
# The requests through each router in a round, by kind and length of the prompt in tokens. Ids and texts are plain
# requests to /v1/completions and /v1/chat/completions; the router sends a text to the engine for its tokens.
COUNTS = {("ids", 256): 300, ("ids", 4_096): 150, ("text", 256): 200, ("text", 4_096): 60}
STREAMS = 40
CROWD_S = 1.5
QUICK_SHARE = 10


class Row(msgspec.Struct):
    """The differences of one router from the one of the other version."""

    request: str
    router: str
    # The median of all differences between requests, and the quartiles of the medians of the rounds.
    median_us: float
    low_us: float
    high_us: float
    # The median time of the other version.
    before_us: float
    # The CPU for a request over many connections, of this router and of the other version; 0 for streams.
    cpu_us: float = 0.0
    before_cpu_us: float = 0.0


Times = dict[str, list[float]]


def requests(ports: Mapping[str, int], prompts: Prompts, count: int, turn: int) -> Times:
    """Return the seconds of each request through each router."""
    clients = {name: HttpClient(port) for name, port in ports.items()}
    times: Times = {name: [] for name in ports}
    for number in range(count + WARM_REQUESTS):
        for name in ordered(ports, turn + number):
            taken_s = timed(clients[name], prompts.request(ports[name]))
            if number >= WARM_REQUESTS:
                times[name].append(taken_s)
    for client in clients.values():
        client.close()
    return times


def streams(ports: Mapping[str, int], prompts: Prompts, count: int, turn: int) -> tuple[Times, Times]:
    """Return the seconds to the first chunk of each stream, and the median of its later chunks, through each router."""
    first: Times = {name: [] for name in ports}
    later: Times = {name: [] for name in ports}
    for number in range(count):
        for name in ordered(ports, turn + number):
            first_s, later_s = streamed(ports[name], prompts.request(ports[name], stream=True))
            first[name].append(first_s)
            later[name].append(statistics.median(later_s))
    return first, later


def rows_of(request: str, rounds: list[Times], cpu_us: Mapping[str, list[float]] | None = None) -> Iterator[Row]:
    """Yield the row of each router but the other version."""
    before_us = statistics.median(time_s for times in rounds for time_s in times[BEFORE]) * 1e6
    for name in (NOW, CONTROL):
        differences = [
            [(mine - other) * 1e6 for mine, other in zip(times[name], times[BEFORE], strict=True)] for times in rounds
        ]
        medians = [statistics.median(values) for values in differences]
        low, _, high = statistics.quantiles(medians, n=4) if len(medians) > 1 else (medians[0],) * 3
        whole_us = statistics.median(value for values in differences for value in values)
        row = Row(request, name, whole_us, low, high, before_us)
        if cpu_us is not None:
            row.cpu_us, row.before_cpu_us = statistics.median(cpu_us[name]), statistics.median(cpu_us[BEFORE])
        yield row


def measure(folder: Path, other: str, rounds: int, *, quick: bool) -> tuple[list[Row], list[str]]:
    rows, loads = list[Row](), [load_now()]
    pythons = {BEFORE: other, NOW: sys.executable, CONTROL: sys.executable}
    with ways(folder, (), list(pythons), pythons) as (ports, pids):
        check(ports)
        ports = {name: ports[name] for name in pids}
        for (kind, tokens), whole in COUNTS.items():
            seen: list[Times] = []
            cpu_us: dict[str, list[float]] = {name: [] for name in ports}
            for turn in range(rounds):
                progress(f"{tokens} tokens, {kind}, round {turn + 1} of {rounds}")
                prompts = Prompts(kind, tokens)
                seen.append(requests(ports, prompts, whole // QUICK_SHARE if quick else whole, turn))
                for name in ordered(ports, turn):
                    many = crowd(ports[name], [pids[name]], prompts, CONNECTIONS, CROWD_S / (3 if quick else 1))
                    cpu_us[name].append(many.used_s[0] / len(many.times_s) * 1e6)
            rows += rows_of(f"{tokens:,} tokens, {kind}", seen, cpu_us)
            loads.append(load_now())
        first, later = list[Times](), list[Times]()
        for turn in range(rounds):
            progress(f"streams, round {turn + 1} of {rounds}")
            for gathered, times in zip(
                (first, later),
                streams(ports, Prompts("ids", 256), STREAMS // QUICK_SHARE if quick else STREAMS, turn),
                strict=True,
            ):
                gathered.append(times)
        rows += rows_of("stream, first chunk", first)
        rows += rows_of("stream, each chunk", later)
        loads.append(load_now())
        used = {name: round(cpu_s(pid), 1) for name, pid in pids.items()}
    return rows, [
        f"CPU seconds of each router in all: {used}",
        f"load average while it ran, the benchmark's own included: {min(loads):.1f} to {max(loads):.1f}",
    ]


def table(rows: list[Row]) -> str:
    lines = [["request", "router", "differs by, us", "quartiles of rounds", "before, us", "CPU, us", "CPU before, us"]]
    for row in rows:
        spread = f"{row.low_us:+.1f} to {row.high_us:+.1f}"
        cpu = [f"{row.cpu_us:.0f}", f"{row.before_cpu_us:.0f}"] if row.cpu_us else ["", ""]
        lines.append([row.request, row.router, f"{row.median_us:+.1f}", spread, f"{row.before_us:.0f}", *cpu])
    return markdown(lines)


def main() -> None:
    parser = parser_of(__doc__, quick=True, result=True)
    parser.add_argument("--other", required=True, metavar="PYTHON", help="the interpreter of the other version's .venv")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    about, others = machine(), Others()
    with scratch() as folder:
        rows, notes = measure(
            folder, arguments.other, 2 if arguments.quick else arguments.rounds, quick=arguments.quick
        )
    notes.append(others.note())
    finish(Result("proxy_before", arguments.quick, about, rows, notes), arguments.json, table(rows))
    print("- " + "; ".join(f"{name}: {value}" for name, value in about.items()))


if __name__ == "__main__":
    main()
