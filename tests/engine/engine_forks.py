# SPDX-License-Identifier: Apache-2.0
"""Engines forked from a process that has imported vLLM, because that import takes longer than the rest of a start.

Each test process has one such process. It ends with the test process, and so do the engines, because their input ends.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_REQUEST_BYTES = 256 * 1024
CUDA_DEVICE = Path("/dev/nvidiactl")


class ForkedEngine:
    """A forked process that runs `offload_child.py` with these options.

    It has the attributes and methods of `subprocess.Popen` that tests use.
    """

    def __init__(self, options: Mapping[str, Any], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        request = {"options": options, "environment": dict(environment), "folder": str(folder)}
        its_stdin, our_stdin = os.pipe()
        our_stdout, its_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(our_stdin, "w"), os.fdopen(our_stdout)
        with log.open("wb") as errors:
            forker = _forker()
            socket.send_fds(forker, [json.dumps(request).encode()], [its_stdin, its_stdout, errors.fileno()])
            self.pid = int(forker.recv(64))
        os.close(its_stdin)
        os.close(its_stdout)
        self._ends = os.pidfd_open(self.pid)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended. Raises subprocess.TimeoutExpired after `timeout_s`."""
        if not select.select([self._ends], [], [], timeout_s)[0]:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired("offload_child.py", timeout_s)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._ends, number)


@functools.cache
def _forker() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.engine_forks", str(its.fileno())], cwd=ROOT, pass_fds=[its.fileno()]
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(forker: socket.socket) -> None:
    from tests.engine import offload_child

    # A process that has looked at a CUDA device cannot be forked into one that uses the device.
    if not CUDA_DEVICE.exists():
        import vllm  # noqa: F401
        from vllm import LLM, SamplingParams  # noqa: F401

    # Nothing reads the exit status of an engine, so ended engines are not kept as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, fds, _, _ = socket.recv_fds(forker, MAX_REQUEST_BYTES, 3)
        if not request:
            return
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            forker.send(str(pid).encode())
            continue
        forker.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        arguments = json.loads(request)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin = os.fdopen(0)
        os.chdir(arguments["folder"])
        os.environ.clear()
        os.environ.update(arguments["environment"])
        offload_child.serve(arguments["options"])
        return


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
