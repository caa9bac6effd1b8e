# SPDX-License-Identifier: Apache-2.0
"""Claim: after its warm-up a router's memory is flat and it opens no more files, for as long as it runs.

One router on one Valkey follows eight simulated engines that store and evict 10,000 blocks/s in all, and answers 200
questions a second: three in four about prompts that the engines know, by hash; the others choose a worker for a prompt
of tokens, and half of these prompts were never seen before. Each connection is closed and opened again after a hundred
questions. Twice a minute one engine's batches go missing and come by replay, one of the workers is unregistered and
registered again, and `/workers` and `/metrics` are read. Memory and open files of both processes are read every ten
seconds. The claim is judged by the router's peak in each minute, as a replay takes some 40 MiB for a moment. At the end
the answers and the sets in Redis are compared with the engines' holdings, block by block.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.processes import peak_rss_bytes, rss_bytes
from benchmarks.report import parser_of
from tests.support.churn import BLOCK, HASHES, Churn
from tests.support.fleet import MODEL, check, register
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

RESULTS = Path(__file__).parent / "results" / "soak.json"

ENGINES = 8
CONNECTIONS = 8
QUESTIONS_A_CONNECTION = 100
SAMPLE_S = 10.0
SAMPLES_A_MINUTE = 6
# Fewer peaks would show no growth, even with a leak.
MIN_JUDGED_MINUTES = 4
UPSET_S = 30.0
PROMPT_TOKENS = 1_024
KNOWN_PROMPTS = 200
# The segment memory is full long before the warm-up ends, as bounded structures are meant to grow up to their bound.
SEGMENT_MEMORY_BYTES = 32 * 1024**2
MIB = 1024**2
# The largest accepted growth an hour, as a share of the router's memory. A leak of one small object a question or a
# batch is ten times this.
MAX_GROWTH_AN_HOUR = 0.02


class Sample(msgspec.Struct):
    """The memory and the open files of both processes at one moment."""

    # Seconds since the start.
    at_s: float
    # Resident memory; the peak is since the previous sample.
    router_bytes: int
    router_peak_bytes: int
    router_files: int
    store_bytes: int
    store_files: int
    # Questions so far.
    answered: int
    failed: int


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def slope_an_hour(points: list[tuple[float, float]]) -> float:
    """Return the growth an hour of (seconds, value) points: the median of the slopes between all pairs (Theil-Sen).

    The memory that one replay takes for a second would move the line of least squares, and is no growth.
    """
    slopes = [(b - a) / (t - s) for i, (s, a) in enumerate(points) for t, b in points[i + 1 :]]
    return statistics.median(slopes) * 3600 if slopes else 0.0


def router_peaks(samples: list[Sample]) -> list[tuple[float, float]]:
    """Return for each whole minute of samples when it began, in s, and the router's peak memory, in MiB."""
    starts = range(0, len(samples) - SAMPLES_A_MINUTE + 1, SAMPLES_A_MINUTE)
    minutes = [samples[start : start + SAMPLES_A_MINUTE] for start in starts]
    return [(minute[0].at_s, max(sample.router_peak_bytes for sample in minute) / MIB) for minute in minutes]


class Asker:
    """A client that sends questions at a rate over short-lived connections, and keeps the time of each."""

    def __init__(self, port: int, rate: float, rng: random.Random) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._rate = rate
        self._rng = rng
        self._known = [self._prompt() for _ in range(KNOWN_PROMPTS)]
        self.times_ms: list[float] = []
        self.failed: list[str] = []

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]

    def _question(self) -> tuple[str, dict[str, Any]]:
        if self._rng.random() < 0.75:
            chain = self._rng.choice(HASHES)
            return "/query_by_hash", {"model": MODEL, "block_hashes": chain, "num_tokens": len(chain) * BLOCK + 1}
        tokens = self._prompt() if self._rng.random() < 0.5 else self._rng.choice(self._known)
        return "/select", {"model": MODEL, "token_ids": tokens}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._connection())

    async def _connection(self) -> None:
        pause_s = CONNECTIONS / self._rate
        due_s = time.monotonic() + self._rng.uniform(0, pause_s)
        while True:
            async with aiohttp.ClientSession() as session:
                for _ in range(QUESTIONS_A_CONNECTION):
                    await asyncio.sleep(due_s - time.monotonic())
                    due_s += pause_s
                    await self._ask(session)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        path, body = self._question()
        begun = time.perf_counter()
        try:
            async with session.post(self._url + path, json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    self.failed.append(f"{path}: {answer.status} {text[:200]}")
        except (aiohttp.ClientError, OSError) as error:
            self.failed.append(f"{path}: {error!r}")
        self.times_ms.append(1000 * (time.perf_counter() - begun))


class Soak:
    """The router, its store and its engines, with all samples of them."""

    def __init__(self, folder: Path, stack: ExitStack, blocks: float, questions: float, rng: random.Random) -> None:
        self._rng = rng
        self.server = stack.enter_context(StoreServer(folder / "store"))
        self.churn = stack.enter_context(Churn(ENGINES, blocks))
        flags = ["--redis", self.server.url, "--segment-memory-bytes", str(SEGMENT_MEMORY_BYTES)]
        self.router = stack.enter_context(RouterProcess(folder / "router", flags))
        register(self.router, self.churn)
        self.churn.ask("go")
        self.asker = Asker(self.router.port, questions, rng)
        self.samples: list[Sample] = []
        self._begun_s = time.monotonic()

    def take(self) -> Sample:
        router, store = self.router.pid, self.server.pid
        sample = Sample(
            time.monotonic() - self._begun_s,
            rss_bytes(router),
            peak_rss_bytes(router),
            open_files(router),
            rss_bytes(store),
            open_files(store),
            len(self.asker.times_ms),
            len(self.asker.failed),
        )
        self.samples.append(sample)
        return sample

    def upset(self) -> None:
        """Do what happens in everyday use: lose batches, register a worker again, read `/workers`, `/metrics`."""
        self.churn.ask("drop")
        number = self._rng.randrange(ENGINES)
        worker, (events, replay) = self.churn.workers[number], self.churn.endpoints[number]
        self.router.unregister(worker)
        self.router.register(worker, MODEL, events, replay, patch_endpoint="off")
        self.router.request("GET", "/workers")
        self.router.text("/metrics")

    async def run(self, minutes: float, warm_up: float) -> None:
        asking = asyncio.create_task(self.asker.run())
        end_s, upset_s = self._begun_s + 60 * minutes, self._begun_s + UPSET_S
        try:
            while (now := time.monotonic()) < end_s and not asking.done():
                sample = self.take()
                if now >= upset_s:
                    upset_s += UPSET_S
                    await asyncio.to_thread(self.upset)
                if len(self.samples) % SAMPLES_A_MINUTE == 1:
                    self._tell(sample, 60 * warm_up)
                await asyncio.sleep(SAMPLE_S)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _tell(self, sample: Sample, warm_up_s: float) -> None:
        growth = slope_an_hour(
            router_peaks([past_sample for past_sample in self.samples if past_sample.at_s >= warm_up_s])
        )
        print(
            f"{sample.at_s / 60:5.1f} min  router {sample.router_bytes / MIB:6.1f} MiB, {sample.router_files} files  "
            f"store {sample.store_bytes / MIB:6.1f} MiB, {sample.store_files} files  {sample.answered:,} answers  "
            f"{sample.failed} failed  slope {growth:+.2f} MiB/h",
            flush=True,
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, help="minutes (default: a quarter of all)")
    parser.add_argument("--blocks", type=float, default=10_000.0, help="a second, stored and removed, of all engines")
    parser.add_argument("--questions", type=float, default=200.0, help="a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args()
    warm_up = options.minutes / 4 if options.warm_up is None else options.warm_up
    if options.minutes - warm_up < MIN_JUDGED_MINUTES:
        parser.error(f"at least {MIN_JUDGED_MINUTES} minutes must follow the warm-up of {warm_up:g}: raise --minutes")
    # Ctrl-C ends the run also where a shell has background jobs ignore it; SIGTERM does the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="kvr-soak-") as folder, ExitStack() as stack:
        soak = Soak(Path(folder), stack, options.blocks, options.questions, random.Random(options.seed))
        begun = time.monotonic()
        batches = -sum(soak.churn.ask("seqs"))
        asyncio.run(soak.run(options.minutes, warm_up))
        took_s = time.monotonic() - begun
        batches += sum(soak.churn.ask("seqs"))
        hits = check([soak.router], soak.server.client, soak.churn)
        gaps = sum(row["gaps"] for row in soak.router.request("GET", "/workers")["workers"])
        problems = report(soak, took_s, 60 * warm_up, batches, hits, gaps, options.json)
    sys.exit("\n".join(problems) or None)


def report(soak: Soak, took_s: float, warm_up_s: float, batches: int, hits: int, gaps: int, file: Path) -> list[str]:
    """Print and write the figures, and return the problems that refute the claim."""
    settled = [sample for sample in soak.samples if sample.at_s >= warm_up_s]
    slopes = {
        "router memory": slope_an_hour(router_peaks(settled)),
        "router files": slope_an_hour([(sample.at_s, sample.router_files) for sample in settled]),
        "store memory": slope_an_hour([(sample.at_s, sample.store_bytes / MIB) for sample in settled]),
    }
    times, failed = soak.asker.times_ms, soak.asker.failed
    cuts = statistics.quantiles(times, n=1000)
    last = settled[-1]
    result = {
        "minutes": round(took_s / 60, 1),
        "batches_a_second": round(batches / took_s, 1),
        "questions_a_second": round(len(times) / took_s, 1),
        "failed_questions": len(failed),
        "question_ms": {"p50": round(cuts[499], 2), "p99": round(cuts[989], 2), "p999": round(cuts[998], 2)},
        "slope_an_hour": {
            "router_mib": round(slopes["router memory"], 2),
            "router_files": round(slopes["router files"], 2),
            "store_mib": round(slopes["store memory"], 2),
        },
        "router_mib": [round(sample.router_bytes / MIB, 1) for sample in (settled[0], last)],
        "router_files": sorted({sample.router_files for sample in settled}),
        "store_mib": [round(sample.store_bytes / MIB, 1) for sample in (settled[0], last)],
        "gaps": gaps,
        "hits_compared": hits,
        "router_mib_by_minute": [round(sample.router_bytes / MIB, 1) for sample in soak.samples[::SAMPLES_A_MINUTE]],
        "router_peak_mib_by_minute": [round(peak, 1) for _, peak in router_peaks(soak.samples)],
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "own_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    problems = []
    if slopes["router memory"] > MAX_GROWTH_AN_HOUR * last.router_bytes / MIB:
        problems.append(f"the router's memory grows by {slopes['router memory']:.2f} MiB an hour")
    # The number of open files differs from sample to sample, as connections come and go; it must not grow.
    if slopes["router files"] > 1:
        problems.append(f"the router's open files grow by {slopes['router files']:.2f} an hour")
    if failed:
        problems.append(f"{len(failed)} questions failed, the first: {failed[0]}")
    return problems


if __name__ == "__main__":
    main()
