# SPDX-License-Identifier: Apache-2.0
"""A real `kvrouter serve` process with its embedded Valkey, and the HTTP requests that tests send to it.

The process is forked (`preloaded_router.py`) or started.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import redis

from kvrouter.router.base.common.compiled import UNCOMPILED
from tests.support.ports import free_port
from tests.support.preloaded_router import PreloadedRouter

# Long enough for a machine under load.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# From publication to an answer that shows it. The router flushes every few milliseconds; a busy machine is slower.
VISIBLE_TIMEOUT_S = 30.0
_POLL_S = 0.002

# Another command to start, for example a router under a debugger; `--port` and the rest are appended.
COMMAND_VARIABLE = "KVROUTER_TEST_COMMAND"
# With the value 1, routers are forked from a process that has already imported their modules. Benchmarks start the
# command itself.
PRELOAD_VARIABLE = "KVROUTER_TEST_PRELOAD"


class RouterError(AssertionError):
    """A router that did not start, answered with an error, or did not show a batch in time."""


def end_process(process: subprocess.Popen[bytes] | PreloadedRouter, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Terminate a process, and kill it if it has not ended in time."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class RouterProcess:
    """A router that runs from entry to exit, with one keep-alive connection to it."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        api_key: str | None = None,
    ) -> None:
        """Prepare the router, with an embedded store unless the flags or the environment name a Redis.

        Args:
            folder: The working folder, with the log and the data of the embedded store.
            arguments: Further flags of `kvrouter serve`.
            environment: Variables that are added to those of this process.
            tls: The client's TLS context, if the flags name a certificate.
            api_key: The key that is sent with each request.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        shared = "--data-dir" in arguments or "--redis" in arguments or "KVROUTER_REDIS" in (environment or {})
        self._arguments = [*arguments] if shared else ["--data-dir", str(folder / "data"), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self.port = free_port()
        self._log = folder / "router.log"
        # A forked router has been imported already, and all of our own variables but one are read after the imports.
        ours = all(name.startswith("KVROUTER_") and name != UNCOMPILED for name in environment or {})
        self._preloaded = ours and COMMAND_VARIABLE not in os.environ and os.environ.get(PRELOAD_VARIABLE) == "1"
        self._process: subprocess.Popen[bytes] | PreloadedRouter | None = None
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        if tls is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=VISIBLE_TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=VISIBLE_TIMEOUT_S, context=tls
            )

    def __enter__(self) -> Self:
        default = f"{shlex.quote(sys.executable)} -m kvrouter.router.cli serve"
        command = shlex.split(os.environ.get(COMMAND_VARIABLE, default))
        command += ["--port", str(self.port), *self._arguments]
        if self._preloaded:
            arguments = ["serve", "--port", str(self.port), *self._arguments]
            self._process = PreloadedRouter(arguments, self._environment, self._folder, self._log)
        else:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, cwd=self._folder, env=self._environment
                )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.request("GET", "/health")
            except OSError:
                time.sleep(0.05)
            else:
                return self
        self.__exit__()
        raise RouterError(f"the router did not come up: {shlex.join(command)}\n{self.log_tail()}")

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        process, self._process = self._process, None
        if process is None:
            return
        end_process(process)

    def kill(self) -> None:
        """Kill the process with SIGKILL, so that it cannot return its leases; its embedded store keeps running."""
        process, self._process = self._process, None
        self._connection.close()
        assert process is not None
        process.kill()
        process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        assert self._process is not None
        return self._process.wait(STOP_TIMEOUT_S)

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def reconnect(self) -> None:
        """Use a new connection for the next requests."""
        self._connection.close()

    @contextlib.contextmanager
    def store(self) -> Iterator[redis.Redis]:
        """Yield a client of the embedded store."""
        with redis.Redis(unix_socket_path=str(next((self._folder / "data").glob("*.sock")))) as client:
            yield client

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return the text of the answer to a GET, or, with a body, to a POST."""
        answer = self._ask("GET", path, None) if body is None else self._ask("POST", path, json.dumps(body))
        return answer[1].decode()

    def signal(self, number: int) -> None:
        """Send a signal to the process; this object keeps managing it."""
        assert self._process is not None
        self._process.send_signal(number)

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Send a request and return the decoded JSON answer.

        Raises:
            RouterError: If the status is above 299.
            OSError: If nobody answers.
        """
        status, answer = self._ask(method, path, None if body is None else json.dumps(body), headers)
        if status > 299:
            raise RouterError(f"{method} {path} gave {status}: {answer[:500]!r}")
        return json.loads(answer)

    def _ask(
        self, method: str, path: str, payload: str | None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        try:
            return self._exchange(method, path, payload, headers)
        except (OSError, http.client.HTTPException):
            # The server may have closed the idle connection after some seconds, or may have been killed. All requests
            # of the tests may be sent twice.
            try:
                return self._exchange(method, path, payload, headers)
            except (OSError, http.client.HTTPException) as error:
                raise OSError(f"{method} {path}: {error!r}") from error

    def _exchange(
        self, method: str, path: str, payload: str | None, headers: Mapping[str, str] | None
    ) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer.

        A failure closes the connection, and the next exchange opens a new one.
        """
        try:
            all_headers = {"content-type": "application/json", **self._headers, **(headers or {})}
            self._connection.request(method, path, payload, all_headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self._connection.close()
            raise

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one sample of `/metrics`; 0 if there is none."""
        _, text = self._ask("GET", "/metrics", None)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        for line in text.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and wanted <= set(sample.partition("{")[2].rstrip("}").split(",")):
                return float(value)
        return 0.0

    def register(
        self,
        worker_id: str,
        model: str,
        endpoint: str,
        replay_endpoint: str,
        catalog: dict[str, Any] | None = None,
        patch_endpoint: str | None = None,
    ) -> None:
        body = {"worker_id": worker_id, "model": model, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
        optional = {"catalog": catalog, "patch_endpoint": patch_endpoint}
        self.request("POST", "/register", body | {name: value for name, value in optional.items() if value is not None})

    def unregister(self, worker_id: str) -> None:
        self.request("POST", "/unregister", {"worker_id": worker_id})

    def worker(self, worker_id: str) -> dict[str, Any]:
        """Return the worker's row of `/workers`; raises RouterError if it is not listed."""
        for row in self.request("GET", "/workers")["workers"]:
            if row["worker_id"] == worker_id:
                return dict(row)
        raise RouterError(f"/workers does not list {worker_id}")

    def wait_connected(self, worker_id: str, subscribed: Callable[[], object] = lambda: time.sleep(0.2)) -> None:
        """Wait until the router has subscribed to the worker's event stream.

        Otherwise the router could miss the last batch of an engine that then falls idle.

        Args:
            worker_id: The worker.
            subscribed: Waits for the subscription, which reaches the engine shortly after the state has changed. The
                publisher of a real engine does not show it, so the default sleeps.
        """
        self.wait_row(worker_id, lambda row: row["state"] not in ("connecting", "down"), "connected to")
        subscribed()

    def wait_proven(self, worker_id: str, more: Callable[[dict[str, Any]], bool] = lambda row: True) -> dict[str, Any]:
        """Wait until a new heartbeat has proven a patched worker's index and `more` holds, and return its row."""

        def beats(row: dict[str, Any]) -> int:
            return row["patch"]["heartbeats"] if row["patch"] else 0

        before = beats(self.worker(worker_id))
        return self.wait_row(
            worker_id, lambda row: row["state"] == "live" and beats(row) > before and more(row), "proven"
        )

    def wait_seen(self, worker_id: str, seq: int) -> dict[str, Any]:
        """Wait until the worker's answers show batch `seq`, and return its row."""
        return self.wait_row(
            worker_id, lambda row: (-1 if row["seq"] is None else row["seq"]) >= seq, f"at seq {seq} of"
        )

    def wait_row(
        self, worker_id: str, reached: Callable[[dict[str, Any]], bool], what: str = "as wanted:"
    ) -> dict[str, Any]:
        """Wait until `reached` is true for the worker's row, and return the row."""
        deadline = time.monotonic() + VISIBLE_TIMEOUT_S
        while True:
            row = self.worker(worker_id)
            if reached(row):
                return row
            if time.monotonic() > deadline:
                raise RouterError(f"not {what} {worker_id} after {VISIBLE_TIMEOUT_S} s: {row}\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def query(
        self, model: str, worker_id: str, token_ids: tuple[int, ...], cache_salt: str | None, explain: bool = False
    ) -> dict[str, Any]:
        """Return the worker's part of the answer to a `/query`."""
        body: dict[str, Any] = {"model": model, "token_ids": token_ids}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        if explain:
            body["explain"] = True
        return dict(self.request("POST", "/query", body)["instances"][worker_id])
