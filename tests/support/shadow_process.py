# SPDX-License-Identifier: Apache-2.0
"""A real `kvrouter shadow --json` process beside a router."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Self

from tests.support.fleet import until

STOP_S = 30.0


class ShadowProcess:
    """A shadow that runs from entry to exit; `counters` are the last that it printed."""

    def __init__(self, url: str, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "kvrouter.router.cli", "shadow", "--url", url, "--json"]
        self._command += ["--interval", "0.02", *arguments]
        self.counters: dict[str, Any] = {}
        self.started: list[str] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_started)]
        for thread in self._threads:
            thread.start()
        inputs = len({"--listen", "--log"} & set(self._command))
        until(lambda: len(self.started) >= inputs or self._process.poll() is not None, "the shadow has started")
        assert self._process.poll() is None, self.started
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.counters = json.loads(line)

    def _read_started(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.started.append(line)

    @property
    def mirror_port(self) -> int:
        """The port to which requests are mirrored."""
        line = next(line for line in self.started if "mirror requests to" in line)
        return int(line.partition("http://")[2].partition(";")[0].rpartition(":")[2])

    def wait_seen(self, requests: int, *, waiting: int = 0) -> None:
        """Wait until `requests` requests have been judged or skipped, and `waiting` requests wait for their outcome."""

        def seen() -> bool:
            counters = self.counters
            counts = bool(counters) and (
                counters["judged_requests"] + counters["skipped_requests"],
                counters["waiting_requests"],
            )
            return counts == (requests, waiting)

        until(seen, f"{requests} requests are seen, {waiting} wait")

    def write(self, line: str) -> None:
        """Write a line to the process's stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def finish(self, number: int | None = signal.SIGINT) -> dict[str, Any]:
        """End the process by this signal, or by the end of its stdin if `number` is None, and return its report."""
        if number is not None:
            self._process.send_signal(number)
        else:
            assert self._process.stdin is not None
            self._process.stdin.close()
        assert self._process.wait(STOP_S) == 0
        self._threads[0].join()
        assert self.counters["type"] == "report"
        return self.counters
