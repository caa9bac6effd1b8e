# SPDX-License-Identifier: Apache-2.0
"""Single requests over connections of their own, and runs of the command line, for tests and benchmarks."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

TIMEOUT_S = 60.0
CLI = (sys.executable, "-m", "kvrouter.router.cli")
CLI_TIMEOUT_S = 120.0
JSON_HEADERS = {"content-type": "application/json"}


class Answer(NamedTuple):
    """A whole answer; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


def exchange(port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
    """Send one request to a port of this machine; a body that is not bytes is sent as JSON."""
    payload = body if body is None or isinstance(body, bytes) else json.dumps(body)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request(method, path, payload, {**JSON_HEADERS, **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, content)


def port_of(url: str) -> int:
    """Return the port of an address such as http://127.0.0.1:8000."""
    return int(url.rpartition(":")[2])


def post(url: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
    """Send a POST that succeeds, and return the decoded answer; None if it is empty."""
    answer = exchange(port_of(url), "POST", path, body, headers)
    assert answer.status < 300, (answer.status, answer.content[:500])
    return answer.json() if answer.content else None


def listens(port: int) -> bool:
    """Return whether a port of this machine takes a connection."""
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def run_cli(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command `kvrouter` to its end, and return its outputs as text."""
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": CLI_TIMEOUT_S, "check": False}
    return subprocess.run([*CLI, *arguments], **(settings | options))
