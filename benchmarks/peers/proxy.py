# SPDX-License-Identifier: Apache-2.0
"""The proxy beside vllm-router's kv_aware and cache_aware policies: prompts of token ids, and streams.

nginx and HAProxy, which have no choice to make, show what a hop costs at best. proxy_overhead.py measures more ways and also texts.
"""

from __future__ import annotations

from benchmarks import plain_proxies
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.table import OURS, Findings, PeerRow, peer_row
from benchmarks.proxy_overhead import SIZES, StreamRow
from benchmarks.proxy_overhead import measure as measure_ways
from benchmarks.proxy_ways import CACHE_AWARE, KV_AWARE
from benchmarks.proxy_ways import OURS as OUR_WAY

# The least wanted ratio by the prompt's tokens, for the added time and for requests a CPU second; against kv_aware
# alone.
GOALS = dict(zip(SIZES, (1.0, 1.3, 2.0), strict=True))
STREAM_GOAL = 1.0
STREAMS = {
    "added_first_p50_us": "until the first chunk, p50",
    "added_chunk_p50_us": "to each chunk after it, p50",
    "added_chunk_p99_us": "to each chunk after it, p99",
    "cpu_per_chunk_us": "CPU a chunk",
}
WITH_GOAL = ("added_p50_us", "requests_per_cpu_s", "added_first_p50_us", "cpu_per_chunk_us")


def measure(settings: PeerSettings) -> Findings:
    command = settings.vllm_router.command("vllm-router")
    names = (OUR_WAY, CACHE_AWARE, KV_AWARE, *plain_proxies.PLAIN)
    measured, notes = measure_ways(settings.folder, command, quick=settings.quick, names=names, kinds=("ids",))
    problems = dict.fromkeys((KV_AWARE, CACHE_AWARE), settings.vllm_router.problem)
    problems |= {name: plain_proxies.problem(name) for name in plain_proxies.PLAIN}
    rows: list[PeerRow] = []

    def add(what: str, unit: str, values: dict[str, list[float]], field: str, goal: float) -> None:
        """Append a row for each policy of the peer, and for each plain proxy."""
        for peer, problem in problems.items():
            wanted = goal if peer == KV_AWARE and field in WITH_GOAL else None
            more = field == "requests_per_cpu_s"
            values[OURS] = values[OUR_WAY]
            rows.append(peer_row(what, unit, peer, values, goal=wanted, more=more, problem=problem))

    for tokens in SIZES:
        by_field = {row.router: row.rounds for row in measured.requests if row.tokens == tokens}
        for field, what, unit in (
            ("added_p50_us", "adds, p50", "us"),
            ("added_p99_us", "adds, p99", "us"),
            ("requests_per_cpu_s", "64 connections", "requests/CPU s"),
        ):
            values = {name: rounds[field] for name, rounds in by_field.items()}
            add(f"proxy, {tokens:,} ids, {what}", unit, values, field, GOALS[tokens])
    streams: dict[str, StreamRow] = {row.router: row for row in measured.streams}
    for field, what in STREAMS.items():
        values = {name: [float(getattr(row, field))] for name, row in streams.items()}
        add(f"proxy, a stream of 256 ids, {what}", "us", values, field, STREAM_GOAL)
    return Findings(rows, notes)
