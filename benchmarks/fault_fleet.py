# SPDX-License-Identifier: Apache-2.0
"""A real router with two simulated replicas, and the faults that operators make with them, each with its repair.

The workers are in a file that the router watches, by their addresses alone; the engines are `kvrouter sim` processes
whose ports stay when they are started again with other flags. Each fault is a context: it exists until the exit mends
it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.doctor_report import DoctorReport, diagnose
from tests.support.ports import free_port
from tests.support.replica_process import ReplicaProcess
from tests.support.router_process import RouterError, RouterProcess
from tests.support.store_server import StoreServer

MODEL = "sim"
ENGINE_KEY = "engine-key"
# Words of the simulator's tokenizer, one token each, so that a prompt has several blocks.
TEXT = " ".join(["bada", "bide", "bodo", "buka"] * 40)
UP_TIMEOUT_S = 60.0
READABLE_S = 0.02
PERSISTENT = ("--appendonly", "yes")

Entry = dict[str, Any]


class SimEngine:
    """A `kvrouter sim` that can be ended and started again at the same ports with other flags."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, events, replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{events}"
        self.replay = f"tcp://127.0.0.1:{replay}"
        self._process: ReplicaProcess | None = None

    def start(self, *flags: str) -> None:
        """Start the process with these flags beside the usual ones; it listens when this returns."""
        at = ("--port", str(self.port), "--events", self.events, "--replay", self.replay)
        usual = ("--model", MODEL, "--instant", *at)
        self._process = ReplicaProcess(self._folder, [*usual, *flags]).__enter__()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.__exit__()
            self._process = None

    def restart(self, *flags: str) -> None:
        self.kill()
        self.start(*flags)


class FaultFleet:
    """A router, its store, its two engines w0 and w1, and one more engine that no worker has, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undo = contextlib.ExitStack()
        self._numbers = itertools.count()
        self.engines = [SimEngine(folder / f"engine-{number}") for number in range(3)]
        self.store = StoreServer(folder / "store", *PERSISTENT)
        self._file = folder / "workers.yaml"
        self._routers = itertools.count()
        self.router = self._new_router()

    def _new_router(self) -> RouterProcess:
        folder = self._folder / f"router-{next(self._routers)}"
        return RouterProcess(folder, ["--redis", self.store.url, "--workers-file", str(self._file)])

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            for engine in self.engines:
                undo.callback(engine.kill)
                engine.start()
            undo.enter_context(self.store)
            self.list_workers()
            undo.callback(lambda: self.router.__exit__())
            self.router.__enter__()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def list_workers(self, *more: Entry, **changed: Entry) -> None:
        """Write the file of workers: w0 and w1 by their addresses, with the changed fields, and more workers."""
        entries = [
            {"worker_id": name, "url": engine.url} | changed.get(name, {})
            for name, engine in zip(("w0", "w1"), self.engines, strict=False)
        ]
        self._write([*entries, *more])

    def _write(self, entries: list[Entry]) -> None:
        # JSON is YAML. A rename never shows half a file.
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(entries))
        temporary.replace(self._file)

    def report(self, url: str | None = None) -> DoctorReport:
        """Return the doctor's report, of the router or of what listens at `url`."""
        at = url or f"http://127.0.0.1:{self.router.port}"
        return diagnose(Client(at, None), at, time.time)

    # Requests.

    def complete(self, worker: str, *, key: str = "", fresh: bool = False, **fields: Any) -> None:
        """Send a text prompt to one worker through the router, whatever comes of it.

        Args:
            worker: The worker that gets it.
            key: The API key that the client sends; "" sends none.
            fresh: Whether the prompt begins as no other has. Otherwise it is the same each time.
            fields: Further fields of the body.
        """
        headers = {"x-kvrouter-worker": worker} | ({"authorization": f"Bearer {key}"} if key else {})
        text = f"{next(self._numbers)} {TEXT}" if fresh else TEXT
        body = {"model": MODEL, "prompt": text, "max_tokens": 1} | fields
        with contextlib.suppress(RouterError, OSError):
            self.router.request("POST", "/v1/completions", body, headers)

    def converse(self) -> None:
        """Send each worker one prompt that it has and one that is new."""
        for worker in ("w0", "w1"):
            self.complete(worker)
            self.complete(worker, fresh=True)

    def rest(self) -> None:
        """Send nothing."""

    def is_whole(self) -> bool:
        """Return whether the router follows w0 and w1 and knows no other worker."""
        rows = self.router.request("GET", "/workers")["workers"]
        return {(row["worker_id"], row["state"], row["draining"]) for row in rows} == {
            (worker, "live", False) for worker in ("w0", "w1")
        }

    # Faults.

    @contextlib.contextmanager
    def listed(self, *more: Entry, **changed: Entry) -> Iterator[None]:
        """Let the file of workers have these entries and changes."""
        self.list_workers(*more, **changed)
        try:
            yield
        finally:
            self.list_workers()

    @contextlib.contextmanager
    def empty(self) -> Iterator[None]:
        """Let the file of workers be empty."""
        self._write([])
        try:
            yield
        finally:
            self.list_workers()

    @contextlib.contextmanager
    def restarted(self, *flags: str) -> Iterator[None]:
        """Let w1's engine run with these flags."""
        self.engines[1].restart(*flags)
        try:
            yield
        finally:
            self.engines[1].restart()

    @contextlib.contextmanager
    def spare(self, *flags: str, scheme: str = "http", path: str = "", **fields: Any) -> Iterator[None]:
        """Let a third worker be listed, whose engine was started with these flags.

        Args:
            flags: Flags of the engine.
            scheme: The scheme of the worker's URL.
            path: The path at its end.
            fields: Further fields of the entry.
        """
        engine = self.engines[2]
        if flags:
            engine.restart(*flags)
        url = f"{scheme}://127.0.0.1:{engine.port}{path}"
        try:
            with self.listed({"worker_id": "w2", "url": url} | fields):
                yield
        finally:
            if flags:
                engine.restart()

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Let w1's engine be gone."""
        self.engines[1].kill()
        try:
            yield
        finally:
            self.engines[1].start()

    @contextlib.contextmanager
    def without_store(self) -> Iterator[None]:
        """Let the store be gone."""
        self.store.kill()
        try:
            yield
        finally:
            self.store.start()

    @contextlib.contextmanager
    def drained(self) -> Iterator[None]:
        """Let w1 drain."""
        self.router.request("PATCH", "/workers/w1", {"state": "draining"})
        try:
            yield
        finally:
            self.router.request("PATCH", "/workers/w1", {"state": "active"})

    @contextlib.contextmanager
    def another_router(self) -> Iterator[None]:
        """Replace the router with a new process, which begins to follow the workers when this yields."""
        self.router.__exit__()
        self.router = self._new_router()
        self.router.__enter__()
        yield


def is_followed(worker: str) -> Callable[[FaultFleet], bool]:
    """Return a check whether the router follows the worker."""

    def check(fleet: FaultFleet) -> bool:
        with contextlib.suppress(RouterError):
            return bool(fleet.router.worker(worker)["state"] == "live")
        return False

    return check


def has_found_seed(fleet: FaultFleet) -> bool:
    """Return whether w1's hashes are verified with a seed that is not vLLM's own, and its last prediction came true."""
    scheme = fleet.router.worker("w1")["hash_scheme"]
    (decision,) = fleet.router.request("GET", "/decisions?limit=1")["decisions"]
    outcome = decision.get("outcome") or {}
    is_exact = outcome.get("predicted_tokens") == outcome.get("delivered_tokens")
    return is_exact and bool(outcome.get("delivered_tokens")) and "/" in scheme and "(verified)" in scheme


def nowhere() -> str:
    """Return an HTTP address at which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"
