# SPDX-License-Identifier: Apache-2.0
"""The demo's router: `kvrouter serve` in a separate process, used over HTTP as any client would."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A start takes some seconds on a busy machine.
START_S = 60.0
# The router shows a replica's events within milliseconds. If they take this long, something is broken.
VISIBLE_S = 10.0
STOP_S = 10.0
POLL_S = 0.005
REQUEST_S = 30.0

# Lines of the router's log that are shown when it fails.
LOG_LINES = 20


# The bytes that begin an event and those that end a stream, as the engines write them.
EVENT, DONE = b"data: ", b"data: [DONE]\n\n"


class DemoFailed(RuntimeError):
    """A failure that ends the demo; the error's text says why and what to look at."""


# The proxies of the environment are ignored, as all servers are local.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, body: object = None) -> Any:
    """Return the decoded JSON reply to a GET, or a POST if there is a body. Raises DemoFailed if that fails.

    If the reply is a stream of events, return the last event before `[DONE]`.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with _opener.open(request, timeout=REQUEST_S) as reply:
            return json.loads(_last_event(reply.read()) or b"null")
    except urllib.error.HTTPError as error:
        raise DemoFailed(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DemoFailed(f"{url} did not answer: {error}") from None


def _last_event(content: bytes) -> bytes:
    """Return the data of a stream's last event before `[DONE]`, or the content unchanged if it is not a stream."""
    events = content.removesuffix(DONE).rstrip().rpartition(EVENT)
    return events[2] if content.startswith(EVENT) else content


def serve_command(port: int, data_dir: Path, policy: str = "kv") -> list[str]:
    """Return the command that starts a router on loopback, with its own embedded database under `data_dir`."""
    command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--data-dir", str(data_dir), "--log-level", "warning", "--policy", policy]


def free_port() -> int:
    """Return a TCP port that no process listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class RouterProcess:
    """A `kvrouter serve` process with its data and its log in `folder`, from `start` to `stop`."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        command: Callable[[int, Path], list[str]] = serve_command,
    ) -> None:
        self._log = folder / "router.log"
        self._data_dir = folder / "data"
        self._clock = clock
        self._sleep = sleep
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start the router and wait until it answers. Raises DemoFailed with the end of its log if it does not."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        # Settings of the user's own router must not leak into this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(port, self._data_dir),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        deadline = self._clock() + START_S
        while True:
            try:
                call(f"{self.url}/health")
                return
            except DemoFailed:
                if self._process.poll() is not None:
                    raise DemoFailed(f"the router stopped at once:\n{self._log_end()}") from None
                if self._clock() > deadline:
                    raise DemoFailed(f"the router did not answer within {START_S:.0f} s:\n{self._log_end()}") from None
                self._sleep(0.05)

    def stop(self) -> None:
        """End the router with SIGTERM and, if that takes too long, SIGKILL. Safe to call twice."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, path: str, body: object = None) -> Any:
        """Return the router's reply. Raises DemoFailed."""
        return call(self.url + path, body)

    def wait_until_shown(self, worker_ids: list[str], seqs: list[int]) -> None:
        """Wait until the router shows each worker live and up to its seq (-1: nothing published yet)."""
        deadline = self._clock() + VISIBLE_S
        while True:
            rows = {row["worker_id"]: row for row in self.call("/workers")["workers"]}
            behind = [
                f"{worker_id} is {rows[worker_id]['state']} at {rows[worker_id]['seq']} of {seq}"
                if worker_id in rows
                else f"{worker_id} is unknown"
                for worker_id, seq in zip(worker_ids, seqs, strict=True)
                if worker_id not in rows or not _shown(rows[worker_id], seq)
            ]
            if not behind:
                return
            if self._clock() > deadline:
                raise DemoFailed(f"not visible after {VISIBLE_S:.0f} s: {'; '.join(behind)}\n{self._log_end()}")
            self._sleep(POLL_S)

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


def _shown(row: dict[str, Any], seq: int) -> bool:
    if seq < 0:
        # A publisher that never published cannot prove itself live, so all that can be seen is that it is listed.
        return True
    return row["state"] == "live" and row["seq"] is not None and row["seq"] >= seq
