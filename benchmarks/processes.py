# SPDX-License-Identifier: Apache-2.0
"""The programs under test and the publisher as child processes, on free loopback ports.

They are always ended by their own process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.http_client import HttpClient
from benchmarks.workload import BLOCK_TOKENS, CHAIN_BLOCKS, MODEL, Chain
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
VISIBLE_TIMEOUT_S = 120.0
# The pause between two polls: long enough that polling costs the server little, and short beside ingests of half a
# second and more.
POLL_S = 0.005


def rss_bytes(pid: int) -> int:
    """Return the resident set of a process. Source: /proc/PID/statm, proc(5)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes(pid: int) -> int:
    """Return the largest resident set of a process since the last call, or since its start.

    Source: VmHWM in /proc/PID/status, reset by 5 in /proc/PID/clear_refs, proc(5).
    """
    process = Path(f"/proc/{pid}")
    (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM:"))
    (process / "clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def cpu_by_process(pid: int) -> dict[int, float]:
    """Return the CPU time (user and system, in s) of a process and its children by process id.

    It counts threads that still live. Unlike wall time it hardly depends on what else runs on the machine. Source:
    /proc/PID/task/TID/schedstat (ns), children.
    """
    times_s = {pid: 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            times_s[pid] += int((task / "schedstat").read_text().split()[0]) / 1e9
            for child_pid in (task / "children").read_text().split():
                times_s |= cpu_by_process(int(child_pid))
    return times_s


def cpu_s(pid: int) -> float:
    """Return the sum of `cpu_by_process`."""
    return sum(cpu_by_process(pid).values())


@contextlib.contextmanager
def child(command: list[str], log: Path, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, with its output in `log`."""
    # KVROUTER_CACHE is a setting of the benchmarks, and a router refuses a KVROUTER_ variable that is no setting of its
    # own.
    environment = {name: value for name, value in os.environ.items() if name != "KVROUTER_CACHE"}
    # Commands of this folder run as modules, and not in the repository's root.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    with log.open("ab") as out:
        output: dict[str, Any] = {"stdout": out, **pipes}
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, cwd=log.parent, env=environment, stderr=out, **output
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[int]:
    """Run a server, wait until it answers on `port`, and yield its process id."""
    with child(command, log) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} does not serve; it said: {log.read_text()[-2000:]}")
            with contextlib.suppress(OSError, ValueError):
                client = HttpClient(port)
                if client.send(client.request("GET", "/health"))[0] == 200:
                    break
            time.sleep(0.1)
        yield process.pid


class Publisher:
    """A running publisher.py with a frame file."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.endpoints: list[str] = self._answer()["endpoints"]

    @classmethod
    @contextlib.contextmanager
    def run(cls, frames: Path, workers: int) -> Iterator[Publisher]:
        command = [sys.executable, "-m", "benchmarks.publisher", str(frames), "--workers", str(workers)]
        log = frames.with_suffix(".log")
        with child(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            yield cls(process)

    def start(self, line: str) -> None:
        """Send a command whose answer is fetched later with `finish`."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        return self._answer()

    def wait(self) -> None:
        self.start("wait")
        if not self._answer()["subscribed"]:
            raise TimeoutError("a subscriber is missing")

    def send(self, batches: int, rate: float = 0) -> dict[str, Any]:
        self.start(f"send {batches} {rate}")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the publisher ended; see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Served:
    """A server that follows events, this router's or a peer's, with the API that they share: Mooncake's HTTP API."""

    def __init__(self, pid: int, port: int, name: str) -> None:
        self.pid, self.port, self.name = pid, port, name
        self.client = HttpClient(port)

    def hashes(self, chain: Chain) -> NDArray[np.uint64]:
        raise NotImplementedError

    def register(self, endpoints: list[str]) -> None:
        for worker, endpoint in enumerate(endpoints):
            body = {
                "instance_id": worker + 1,
                "endpoint": endpoint,
                "model_name": MODEL,
                "block_size": BLOCK_TOKENS,
                "dp_rank": 0,
            }
            self.client.call("POST", "/register", body)

    def question(self, chain: Chain, *, signed: bool = True) -> bytes:
        """Encode the request for all blocks of a prompt.

        Hashes are signed by default, as dynamo reads only i64; this router reads u64 too.
        """
        hashes = self.hashes(chain)
        values = hashes.view(np.int64).tolist() if signed else hashes.tolist()
        return self.client.request("POST", "/query_by_hash", {"model_name": MODEL, "block_hashes": values})

    def ask(self, request: bytes) -> dict[int, int]:
        """Send a request and return the hit tokens by worker, without workers that have no hit."""
        status, body = self.client.send(request)
        if status == 404:
            # dynamo answers with 404 before the first event.
            return {}
        if status != 200:
            raise RuntimeError(f"{self.name}: {status} {body[:300]!r}")
        instances = json.loads(body)["instances"]
        return {int(worker) - 1: hit["longest_matched"] for worker, hit in instances.items() if hit["longest_matched"]}

    def wait_stored(self) -> None:
        """Wait until everything visible is stored; return at once where the server stores nothing."""

    def wait_visible(self, chain: Chain, worker: int, timeout_s: float = VISIBLE_TIMEOUT_S) -> float:
        """Poll until `worker` has the whole prompt, and return when the last poll began (CLOCK_MONOTONIC)."""
        request = self.question(chain)
        deadline = time.monotonic() + timeout_s
        while True:
            polled_s = time.monotonic()
            if self.ask(request).get(worker) == CHAIN_BLOCKS * BLOCK_TOKENS:
                return polled_s
            if polled_s > deadline:
                raise TimeoutError(f"{self.name}: the last blocks did not become visible in {timeout_s} s")
            time.sleep(POLL_S)


def _waiting(line: bytes) -> bool:
    name, _, value = line.rpartition(b" ")
    return name.startswith((b"kvrouter_commit_lag_seconds{", b"kvrouter_backlog_blocks{")) and float(value) > 0


class Ours(Served):
    """`kvrouter serve` with its private Valkey, as a server to measure."""

    @classmethod
    @contextlib.contextmanager
    def run(cls, folder: Path, *arguments: str) -> Iterator[Ours]:
        port = free_port()
        command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", str(port)]
        command += ["--data-dir", str(folder / f"data-{port}"), "--log-level", "warning", *arguments]
        with serving(command, port, folder / f"kvrouter-{port}.log") as pid:
            yield cls(pid, port, "kvrouter")

    def wait_stored(self) -> None:
        """Poll until no change waits for Valkey."""
        request = self.client.request("GET", "/metrics")
        while any(map(_waiting, self.client.send(request)[1].splitlines())):
            time.sleep(POLL_S)

    def hashes(self, chain: Chain) -> NDArray[np.uint64]:
        return chain.hashes
