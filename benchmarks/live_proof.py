# SPDX-License-Identifier: Apache-2.0
"""Claim: no router shows a worker as `live` without proof, whichever process dies.

No prediction is higher than the engine's own holdings, and no answer is older than the documented bound.

Three worlds, each with real routers on one Valkey and engines whose holdings are known exactly:

- `power`: three routers and their store are killed together, the engines continue to evict, and all start again. While
  they recover, every answer with the state `live` is compared with the engine's holdings.
- `store`: the store of three routers is killed for some seconds under traffic and comes back with its data. Every worker
  that is shown as `live` must be at a batch that its engine had published within the last `BOUND_S`.
- `restarts`: three routers, one of two processes, are replaced one after the other under traffic, while the store is
  emptied or stands still now and then. It is judged like `store`.

The report also has the share of answers that are live with full credit, and the time that a worker takes to become
live.

    make live-proof ARGS="--world power --cycles 200 --replay-pause-ms 20"
"""

from __future__ import annotations

import bisect
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import parser_of, percentile
from tests.support.churn import BLOCK, HASHES, Churn
from tests.support.fleet import MODEL, register, rows, wait_live, wait_shared
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

ENGINES = 6
RATE = 6_000.0
# The greatest age of an answer with the state live about a worker that another router follows
# (docs/reference/states.md).
BOUND_S = 2.0
# The precision of the recorded seqs, as a batch that was just published is still on its way.
RECORD_S = 0.1
# A longer cycle counts as broken, and is reported.
PATIENCE_S = 120.0
OUTAGE_S = 4.0
OPTIONS = ("--appendonly", "yes")
RESULTS = Path(__file__).parent / "results"


class Tally:
    """The answers of one run, from all routers; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        # Answers with the state live, the ones among them with full credit, and the ones with too much.
        self.live = self.full = self.over = 0
        self.wrong: list[str] = []
        # Seconds until a worker was live, from the last batch that it lacked or from the store's return.
        self.until_live_s: list[float] = []

    def add(self, state: str, *, is_full: bool, problem: str = "") -> None:
        with self._lock:
            self.answers[state] += 1
            if state == "live":
                self.live += 1
                self.full += is_full
            if problem:
                self.over += 1
                self.wrong.append(problem)

    def took(self, seconds: float) -> None:
        with self._lock:
            self.until_live_s.append(seconds)

    def report(self) -> dict[str, Any]:
        answers = sum(self.answers.values())
        return {
            "answers": answers,
            "live": self.live,
            "live and full, share of all": round(self.full / max(answers, 1), 4),
            "over": self.over,
            "until live p50 s": round(percentile(self.until_live_s, 0.5), 3),
            "until live p99 s": round(percentile(self.until_live_s, 0.99), 3),
            "states": dict(self.answers),
            "wrong": self.wrong[:10],
        }


class Asker:
    """A keep-alive connection to a router that may die at any time."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the decoded answer; None if no router answers."""
        try:
            payload = None if body is None else json.dumps(body)
            method = "GET" if body is None else "POST"
            self._connection.request(method, path, payload, {"content-type": "application/json"})
            response = self._connection.getresponse()
            content = response.read()
            return json.loads(content) if response.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            self._connection.close()
            return None


class PowerFailures:
    """The world in which routers and store are killed together, again and again."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int, replay_pause_s: float) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self._store = StoreServer(folder / "store", *OPTIONS)
        self._churn = stack.enter_context(Churn(ENGINES, RATE, seed, replay_pause_s=replay_pause_s))
        self._routers: list[RouterProcess] = []
        self.tally = Tally()
        stack.callback(self._end)
        self._start()
        register(self._routers[0], self._churn)
        self._churn.ask("go")
        wait_shared(self._routers, ENGINES)

    def _end(self) -> None:
        for router in self._routers:
            router.__exit__()
        self._store.__exit__()

    def _start(self) -> None:
        self._store.start()
        self._routers = [RouterProcess(self._folder / name, ["--redis", self._store.url]) for name in "abc"]
        with ThreadPoolExecutor(len(self._routers)) as threads:
            list(threads.map(RouterProcess.__enter__, self._routers))

    def cycle(self) -> None:
        churn, rng = self._churn, self._rng
        churn.ask("go")
        time.sleep(rng.uniform(0.3, 1.2))
        for router in self._routers:
            router.kill()
        self._store.kill()
        time.sleep(rng.uniform(0.05, 1.0))
        seqs = dict(zip(churn.workers, churn.ask("pause"), strict=True))
        reuse = churn.ask("dump")["reuse"]
        self._store.start()
        self._routers = [RouterProcess(self._folder / name, ["--redis", self._store.url]) for name in "abc"]
        chains = [list(rng.sample(range(len(HASHES)), len(HASHES))) for _ in self._routers]

        def watch(router: RouterProcess, order: list[int]) -> None:
            router.__enter__()
            self._watch(router.port, order, seqs, reuse)

        with ThreadPoolExecutor(len(self._routers)) as threads:
            list(threads.map(watch, self._routers, chains))

    def _watch(self, port: int, order: list[int], seqs: dict[str, int], reuse: list[list[int]]) -> None:
        """Query a router until every worker is live at its engine's last batch, and judge each answer on the way."""
        asker, workers = Asker(port), self._churn.workers
        reached_s: dict[str, float] = {}
        live: set[str] = set()
        deadline, number = time.monotonic() + PATIENCE_S, 0
        while len(live) < len(workers):
            if time.monotonic() > deadline:
                shown = {
                    row["worker_id"]: (row["state"], row["reason"], row["state_age_s"], row["lag_ms"], row["seq"])
                    for row in (asker.ask("/workers") or {"workers": []})["workers"]
                    if row["worker_id"] not in live
                }
                raise AssertionError(f"not all live after {PATIENCE_S:.0f} s: {shown}; engines are at {seqs}")
            chain = order[number % len(order)]
            number += 1
            question = {"model": MODEL, "block_hashes": HASHES[chain], "num_tokens": len(HASHES[chain]) * BLOCK + 1}
            answer = asker.ask("/query_by_hash", question)
            for worker, instance in ({} if answer is None else answer["instances"]).items():
                truth = reuse[chain][workers.index(worker)]
                over = instance["state"] == "live" and instance["gpu"] > truth
                problem = f"{worker}: live with {instance['gpu']} of {truth} tokens" if over else ""
                self.tally.add(instance["state"], is_full=instance["gpu"] == truth, problem=problem)
            if number % 4 == 0:
                now_s = time.monotonic()
                for row in (asker.ask("/workers") or {"workers": []})["workers"]:
                    name = row["worker_id"]
                    if row["seq"] == seqs[name]:
                        reached_s.setdefault(name, now_s)
                        if row["state"] == "live" and name not in live:
                            live.add(name)
                            self.tally.took(now_s - reached_s[name])


class Published:
    """A record of the batches that each engine had published at each moment."""

    def __init__(self, churn: Churn) -> None:
        self._churn = churn
        self._lock = threading.Lock()
        self._times: list[float] = []
        self._seqs: list[list[int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._thread.start()

    def ask(self, word: str) -> Any:
        """Send a command to the engines, between two records."""
        with self._lock:
            return self._churn.ask(word)

    def _record(self) -> None:
        while not self._ended.is_set():
            seqs = self.ask("sent")
            self._seqs.append(seqs)
            self._times.append(time.monotonic())
            time.sleep(RECORD_S / 4)

    def at(self, moment_s: float) -> list[int] | None:
        """Return the last seq of each engine at a moment; None if the moment is before the first record."""
        number = bisect.bisect_right(self._times, moment_s) - 1
        return None if number < 0 else self._seqs[number]

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Watcher:
    """A judge of one router's `/workers` under traffic, until it is ended."""

    def __init__(self, port: int, published: Published, workers: list[str], tally: Tally) -> None:
        self._asker, self._published, self._workers, self._tally = Asker(port), published, workers, tally
        # The workers that were live in the last answer.
        self.live: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.is_set():
            queried_s = time.monotonic()
            answer = self._asker.ask("/workers")
            oldest = self._published.at(queried_s - BOUND_S - RECORD_S)
            recent = self._published.at(queried_s - 0.5)
            if answer is None or oldest is None or recent is None:
                self.live = set()
                time.sleep(0.05)
                continue
            live = set()
            for row in answer["workers"]:
                number = self._workers.index(row["worker_id"])
                seq = -1 if row["seq"] is None else row["seq"]
                is_live = row["state"] == "live"
                problem = ""
                if is_live and seq < oldest[number]:
                    follower = "another router's" if row["lag_ms"] is None else "its own"
                    problem = (
                        f"{row['worker_id']}: live at batch {seq}, {BOUND_S:g} s ago it was {oldest[number]}; {follower}, "
                        f"{row['state_age_s']:.2f} s in this state, {row['reason']!r}"
                    )
                self._tally.add(row["state"], is_full=is_live and seq >= recent[number], problem=problem)
                if is_live and seq >= recent[number]:
                    live.add(row["worker_id"])
            self.live = live
            time.sleep(0.02)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Traffic:
    """Routers under traffic, watched all the time."""

    FLAGS: tuple[tuple[str, ...], ...] = ((), (), ())

    def __init__(self, folder: Path, stack: ExitStack, seed: int, replay_pause_s: float) -> None:
        self._folder, self._rng, self._stack = folder, random.Random(seed), stack
        self.store = stack.enter_context(StoreServer(folder / "store", *OPTIONS))
        self.churn = stack.enter_context(Churn(ENGINES, RATE, seed, replay_pause_s=replay_pause_s))
        self.tally = Tally()
        self.published: Published | None = None
        self.watchers: list[Watcher] = []
        self.routers = [self.start_router(number) for number in range(len(self.FLAGS))]
        stack.callback(self._end)
        register(self.routers[0], self.churn)
        self.churn.ask("go")
        for router in self.routers:
            wait_live(router)
        self.published = Published(self.churn)
        self.watchers = [self.watch(router) for router in self.routers]
        self.wait_live(time.monotonic())

    def _end(self) -> None:
        for watcher in self.watchers:
            watcher.end()
        if self.published is not None:
            self.published.end()
        for router in self.routers:
            router.__exit__()

    def start_router(self, number: int) -> RouterProcess:
        arguments = ["--redis", self.store.url, *self.FLAGS[number]]
        return RouterProcess(self._folder / f"router{number}", arguments).__enter__()

    def watch(self, router: RouterProcess) -> Watcher:
        assert self.published is not None
        return Watcher(router.port, self.published, self.churn.workers, self.tally)

    def wait_live(self, since_s: float) -> None:
        """Wait until every router shows every worker live and recent, and record the time of each since a moment."""
        waiting = {(number, worker) for number in range(len(self.watchers)) for worker in self.churn.workers}
        deadline = time.monotonic() + PATIENCE_S
        while waiting:
            now_s = time.monotonic()
            if now_s > deadline:
                shown = {name: (row["state"], row["reason"]) for name, row in rows(self.routers[0]).items()}
                raise AssertionError(f"not live after {PATIENCE_S:.0f} s: {sorted(waiting)}; {shown}")
            for number, worker in [pair for pair in waiting if pair[1] in self.watchers[pair[0]].live]:
                waiting.discard((number, worker))
                self.tally.took(now_s - since_s)
            time.sleep(0.005)


class StoreLosses(Traffic):
    """The world in which the store is away for some seconds, again and again."""

    def cycle(self) -> None:
        self.store.kill()
        time.sleep(OUTAGE_S)
        self.store.start()
        returned_s = time.monotonic()
        for watcher in self.watchers:
            watcher.live = set()
        self.wait_live(returned_s)
        time.sleep(self._rng.uniform(0.0, 0.5))


class RollingRestarts(Traffic):
    """The world in which routers are replaced one after the other.

    The store may be emptied, or stand still, at any moment.
    """

    FLAGS = ((), ("--processes", "2"), ())

    def __init__(self, folder: Path, stack: ExitStack, seed: int, replay_pause_s: float) -> None:
        super().__init__(folder, stack, seed, replay_pause_s)
        self._cycles = 0

    def cycle(self) -> None:
        number = self._cycles % len(self.routers)
        self._cycles += 1
        fault = threading.Thread(target=self._fault, args=(self._rng.random(), self._rng.uniform(0.0, 1.5)))
        fault.start()
        self.watchers[number].end()
        self.routers[number].__exit__()
        self.routers[number] = self.start_router(number)
        started_s = time.monotonic()
        self.watchers[number] = self.watch(self.routers[number])
        fault.join()
        self.wait_live(started_s)

    def _fault(self, kind: float, after_s: float) -> None:
        time.sleep(after_s)
        if kind < 0.33:
            self.store.client.flushall()
        elif kind < 0.66:
            self.store.stop()
            time.sleep(2.5)
            self.store.resume()


WORLDS: dict[str, Callable[[Path, ExitStack, int, float], Any]] = {
    "power": PowerFailures,
    "store": StoreLosses,
    "restarts": RollingRestarts,
}


def main() -> int:
    parser = parser_of(__doc__, result=True)
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay-pause-ms", type=float, default=0.0, help="before each batch of a replay")
    arguments = parser.parse_args()
    # With this switch, routers are forked from a process that has already imported all modules.
    os.environ.setdefault("KVROUTER_TEST_PRELOAD", "1")
    begun_s, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        world = WORLDS[arguments.world](Path(name), stack, arguments.seed, arguments.replay_pause_ms / 1_000)
        problem = ""
        try:
            for done in range(1, arguments.cycles + 1):
                world.cycle()
                if done % 10 == 0:
                    tally = world.tally
                    print(f"{done} cycles, {tally.live} live answers, {tally.over} over", flush=True)
        except (AssertionError, KeyboardInterrupt) as error:
            problem = repr(error)[:2_000]
        result = {
            "world": arguments.world,
            "cycles": done,
            "replay pause ms": arguments.replay_pause_ms,
            "seed": arguments.seed,
            "seconds": round(time.monotonic() - begun_s),
            **world.tally.report(),
            **({"ended by": problem} if problem else {}),
        }
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return bool(result["over"] or problem)


if __name__ == "__main__":
    sys.exit(main())
