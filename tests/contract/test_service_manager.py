# SPDX-License-Identifier: Apache-2.0
"""A service manager is notified once, and not before the router answers."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.router_process import RouterProcess, end_process

PATIENCE_S = 60.0


@pytest.fixture(params=["a path", "an abstract address"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Yield the manager's socket, and the address that names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(PATIENCE_S)
        if request.param == "a path":
            address = str(tmp_path / "n")
            listener.bind(address)
        else:
            address = f"@kvrouter-test-{os.getpid()}"
            listener.bind(f"\0{address[1:]}")
        yield listener, address


@pytest.mark.parametrize("processes", [1, 2])
def test_the_manager_is_notified_when_the_router_answers(
    manager: tuple[socket.socket, str], tmp_path: Path, processes: int
) -> None:
    listener, address = manager
    port = free_port()
    command = [sys.executable, "-m", "kvrouter.router.cli", "serve", "--port", str(port)]
    command += ["--data-dir", str(tmp_path / "data"), "--processes", str(processes)]
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=tmp_path, env={**os.environ, "NOTIFY_SOCKET": address}
        )
    try:
        assert listener.recv(100) == b"READY=1"
        # The router answers at once, so the request is not retried.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        end_process(started)
    # The router sent nothing more until its end.
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(100)


def test_a_manager_that_is_not_there_stops_nothing(tmp_path: Path) -> None:
    with RouterProcess(tmp_path, environment={"NOTIFY_SOCKET": str(tmp_path / "nobody")}) as router:
        assert router.request("GET", "/health")
        assert "the service manager cannot be notified" in router.log_tail()
