# SPDX-License-Identifier: Apache-2.0
"""`kvrouter serve` as a process: its start-up line, a real socket, the whole stack, and both ways to stop it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
# Settings of the user's environment must not reach the router.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a router; yield its process and the line that it printed.

    Router and private server are ended by their own pids, also when a test fails.
    """
    command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", "0", "--data-dir", str(folder / "data")]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=ENVIRONMENT
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "listens on" in line, (folder / "log").read_text()
        yield process, line
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(STOP_TIMEOUT_S)
        process.stdout.close()
        pid_file = folder / "data" / "valkey.pid"
        if pid_file.exists() and is_private_server(folder, valkey_pid(folder)):
            os.kill(valkey_pid(folder), signal.SIGKILL)


def get(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=30) as answer:
        return json.loads(answer.read())


def valkey_pid(folder: Path) -> int:
    return int((folder / "data" / "valkey.pid").read_text())


def is_private_server(folder: Path, pid: int) -> bool:
    """Return whether `pid` is the server of this folder, and not another process that got the number later."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == folder / "data"
    except OSError:
        return False


def is_running(pid: int) -> bool:
    """Return whether the process runs.

    A zombie counts as ended, because in a container possibly no process reaps the orphan.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_starts_answers_and_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    # An engine that has not answered yet; a refused connection would show that no engine is there.
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        serving(tmp_path, "--worker", f"w0=http://127.0.0.1:{silent.getsockname()[1]},model=m") as (process, line),
    ):
        url = re.search(r"listens on (http://127\.0\.0\.1:\d+);", line)
        assert url is not None
        assert str(tmp_path / "data") in line
        assert f"kvrouter workers --url {url[1]}" in line
        assert get(f"{url[1]}/health")["status"] in ("ok", "degraded")
        assert [worker["worker_id"] for worker in get(f"{url[1]}/workers")["workers"]] == ["w0"]
        answer = get(f"{url[1]}/query_by_hash", {"model": "m", "block_hashes": [1, -1, "0xff"]})
        assert answer["scores"] == {"w0": {"0": 0}}
        assert get(f"{url[1]}/select", {"model": "m", "token_ids": [1, 2]})["effective_prefill_tokens"] == 2
        pid = valkey_pid(tmp_path)
        assert is_running(pid)
        process.send_signal(number)
        assert process.wait(STOP_TIMEOUT_S) == 0
    assert not is_running(pid)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert log.rstrip().endswith("stopped")


def test_registrations_survive_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, line):
        url = line.split("listens on ")[1].split(";")[0]
        assert "no worker yet" in line
        get(f"{url}/register", {"worker_id": "kept", "model": "m", "url": "http://127.0.0.1:1"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0
    with serving(tmp_path) as (process, line):
        url = line.split("listens on ")[1].split(";")[0]
        assert [worker["worker_id"] for worker in get(f"{url}/workers")["workers"]] == ["kept"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0


def test_a_second_router_on_the_same_data_ends_with_one_line(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, _):
        command = [
            sys.executable,
            "-m",
            "kvrouter.router.cli",
            "serve",
            "--port",
            "0",
            "--data-dir",
            str(tmp_path / "data"),
        ]
        second = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, env=ENVIRONMENT)
        assert second.returncode == 1
        assert second.stderr.startswith("kvrouter: ") and second.stderr.count("\n") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0
