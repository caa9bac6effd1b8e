# SPDX-License-Identifier: Apache-2.0
"""A real `kvrouter sim` process: simulated engine replicas in front of which a router can stand."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.support.router_process import end_process

HTTP_TIMEOUT_S = 30.0
STOP_S = 30.0
# Of `replicas`.
MODEL = "sim"


class ReplicaProcess:
    """One simulated replica. Starts on entry, stops on exit; `endpoints` is what it printed of itself."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        """arguments: further flags of `kvrouter sim`."""
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
        """As `--worker` takes it."""
        return worker_spec(worker_id, self.endpoints)

    def kill(self) -> None:
        """kill -9: its connections are reset, nothing is said."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def faults(self, **given: Any) -> None:
        """POST /sim/faults."""
        host, _, port = self.endpoints["url"].removeprefix("http://").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=HTTP_TIMEOUT_S)
        try:
            connection.request("POST", "/sim/faults", json.dumps(given), {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200, said
        finally:
            connection.close()


def worker_spec(worker_id: str, endpoints: Mapping[str, Any]) -> str:
    """As `--worker` takes it."""
    at = endpoints
    return f"{worker_id}={at['url']},events={at['events']},replay={at['replay']},model={at['model']}"


def worker_flags(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The flags of a router in front of these replicas, which are w0, w1 and so on there."""
    return [part for n, at in enumerate(found) for part in ("--worker", worker_spec(f"w{n}", at))]


@contextmanager
def replicas(count: int, *arguments: str) -> Iterator[list[dict[str, Any]]]:
    """The endpoints of that many replicas of one process."""
    command = [sys.executable, "-m", "kvrouter.router.cli", "sim", "--replicas", str(count), "--instant", *arguments]
    process = subprocess.Popen([*command, "--model", MODEL], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield [json.loads(process.stdout.readline()) for _ in range(count)]
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()
