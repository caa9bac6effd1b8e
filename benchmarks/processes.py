# SPDX-License-Identifier: Apache-2.0
"""The programs under test and the publisher as child processes: started on free loopback ports, always ended by their
own id."""

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

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
VISIBLE_TIMEOUT_S = 120.0
# Rarely enough that asking costs the server little, often enough beside ingests of half a second and more.
POLL_S = 0.005


def rss_bytes(pid: int) -> int:
    """Resident set of a process. Source: /proc/PID/statm, proc(5)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes(pid: int) -> int:
    """The most that a process's resident set was since the last call, or its start. Source: VmHWM in /proc/PID/status,
    reset by 5 in /proc/PID/clear_refs, proc(5)."""
    process = Path(f"/proc/{pid}")
    (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM:"))
    (process / "clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def cpu_by_process(pid: int) -> dict[int, float]:
    """CPU time (user and system, in s) by process id: of a process, its threads that still live, and its children.
    Unlike wall time it hardly depends on what else runs on the machine. Source: /proc/PID/task/TID/schedstat (ns),
    children."""
    found = {pid: 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] += int((task / "schedstat").read_text().split()[0]) / 1e9
            for one in (task / "children").read_text().split():
                found |= cpu_by_process(int(one))
    return found


def cpu_s(pid: int) -> float:
    """The sum of `cpu_by_process`."""
    return sum(cpu_by_process(pid).values())


@contextlib.contextmanager
def child(command: list[str], log: Path, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command until the block ends; what it says is in `log`."""
    # Ours alone: a router refuses a KVROUTER_ variable that is no setting of its own.
    environment = {name: value for name, value in os.environ.items() if name != "KVROUTER_CACHE"}
    with log.open("ab") as out:
        given: dict[str, Any] = {"stdout": out, **pipes}
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, cwd=log.parent, env=environment, stderr=out, **given
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
    """A server that answers on `port`; its process id."""
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
    """publisher.py with a frame file."""

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
        """A command whose answer is fetched later with `finish`."""
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
    """A server that follows events, this router's or a peer's, and what they have in common: Mooncake's HTTP API."""

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
        """The request for all blocks of a prompt. dynamo reads i64 only, we also u64."""
        hashes = self.hashes(chain)
        values = hashes.view(np.int64).tolist() if signed else hashes.tolist()
        return self.client.request("POST", "/query_by_hash", {"model_name": MODEL, "block_hashes": values})

    def ask(self, request: bytes) -> dict[int, int]:
        """Tokens by worker, those without a hit left out."""
        status, body = self.client.send(request)
        if status == 404:
            # dynamo before the first event.
            return {}
        if status != 200:
            raise RuntimeError(f"{self.name}: {status} {body[:300]!r}")
        found = json.loads(body)["instances"]
        return {int(w) - 1: one["longest_matched"] for w, one in found.items() if one["longest_matched"]}

    def wait_stored(self) -> None:
        """Until all that is visible is stored; at once where nothing is stored."""

    def wait_visible(self, chain: Chain, worker: int, timeout_s: float = VISIBLE_TIMEOUT_S) -> float:
        """Polls until `worker` has the whole prompt; when that was seen (CLOCK_MONOTONIC)."""
        request = self.question(chain)
        deadline = time.monotonic() + timeout_s
        while True:
            asked = time.monotonic()
            if self.ask(request).get(worker) == CHAIN_BLOCKS * BLOCK_TOKENS:
                return asked
            if asked > deadline:
                raise TimeoutError(f"{self.name}: the last blocks did not become visible in {timeout_s} s")
            time.sleep(POLL_S)


def _waiting(line: bytes) -> bool:
    name, _, value = line.rpartition(b" ")
    return name.startswith((b"kvrouter_commit_lag_seconds{", b"kvrouter_backlog_blocks{")) and float(value) > 0


class Ours(Served):
    """`kvrouter serve` with its private Valkey."""

    @classmethod
    @contextlib.contextmanager
    def run(cls, folder: Path, *arguments: str) -> Iterator[Ours]:
        port = free_port()
        command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", str(port)]
        command += ["--data-dir", str(folder / f"data-{port}"), "--log-level", "warning", *arguments]
        with serving(command, port, folder / f"kvrouter-{port}.log") as pid:
            yield cls(pid, port, "kvrouter")

    def wait_stored(self) -> None:
        """Polls until nothing waits for Valkey."""
        request = self.client.request("GET", "/metrics")
        while any(map(_waiting, self.client.send(request)[1].splitlines())):
            time.sleep(POLL_S)

    def hashes(self, chain: Chain) -> NDArray[np.uint64]:
        return chain.hashes
