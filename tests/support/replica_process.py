# SPDX-License-Identifier: Apache-2.0
"""A real `kvrouter sim` process with simulated engine replicas, for routers to use as workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.exchange import post
from tests.support.router_process import end_process

STOP_S = 30.0
# The model of the engines of `replicas`.
MODEL = "sim"


class ReplicaProcess:
    """The process of one simulated replica, which runs from entry to exit; it prints its `endpoints` at its start."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        """Prepare the process.

        Args:
            folder: Takes the log.
            arguments: Further flags of `kvrouter sim`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "replica.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoints: dict[str, Any] = {}

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", "from kvrouter.simulator.command import main; raise SystemExit(main())"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *self._arguments], stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__()
            raise AssertionError(f"the replica did not come up: {self._log.read_text()}")
        self.endpoints = json.loads(line)
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        end_process(process)
        assert process.stdout is not None
        process.stdout.close()

    def spec(self, worker_id: str) -> str:
        """Return the replica as the value of a router's flag `--worker`."""
        return worker_spec(worker_id, self.endpoints)

    def kill(self) -> None:
        """Kill the process with SIGKILL, so that its connections are reset without a last message."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def faults(self, **given: Any) -> None:
        """Set faults of the replica with a `POST /sim/faults`."""
        post(self.endpoints["url"], "/sim/faults", given)


def worker_spec(worker_id: str, endpoints: Mapping[str, Any]) -> str:
    """Return a replica with these endpoints as the value of a router's flag `--worker`."""
    at = endpoints
    return f"{worker_id}={at['url']},events={at['events']},replay={at['replay']},model={at['model']}"


def worker_flags(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a router's flags for these replicas, which it names w0, w1 and so on."""
    return [part for n, at in enumerate(found) for part in ("--worker", worker_spec(f"w{n}", at))]


@contextmanager
def replicas(count: int, *arguments: str) -> Iterator[list[dict[str, Any]]]:
    """Run one process with this many replicas, and yield the endpoints of each."""
    command = [sys.executable, "-m", "kvrouter.router.cli", "sim", "--replicas", str(count), "--instant", *arguments]
    process = subprocess.Popen([*command, "--model", MODEL], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield [json.loads(process.stdout.readline()) for _ in range(count)]
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()


@contextmanager
def served(*servers: ReplicaServer) -> Iterator[tuple[ReplicaServer, ...]]:
    """Serve replicas from a thread of this process."""
    thread = ServerThread(servers)
    thread.start()
    try:
        yield servers
    finally:
        thread.stop()
