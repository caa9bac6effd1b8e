# SPDX-License-Identifier: Apache-2.0
"""Engines forked from a process that has imported vLLM, because that import takes longer than the rest of a start.

Each test process has one such process for each engine and search path (`tests/sglang/sglang_forks.py` is SGLang's). It
ends with the test process, and the kernel then ends its engines, also those that are in a session of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_REQUEST_BYTES = 256 * 1024
CUDA_DEVICE = Path("/dev/nvidiactl")
# Names the signal that a process gets when its parent ends. Source: prctl(2).
PR_SET_PDEATHSIG = 1
# The modules that run as the process that is forked: this one, with vLLM.
VLLM = "tests.engine.engine_forks"


class Forked:
    """A forked process with the attributes and methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, request: Mapping[str, Any], environment: Mapping[str, str], fds: Sequence[int], module: str = VLLM
    ) -> None:
        """Fork the process.

        Args:
            request: Has the `options` of `offload_child.py`, or the `arguments` of an HTTP server, and the `folder`.
            environment: The variables of the process.
            fds: Its standard input, output and errors.
            module: Runs as the process that is forked.
        """
        forker = _forker(module, environment.get("PYTHONPATH", ""))
        socket.send_fds(forker, [json.dumps({**request, "environment": dict(environment)}).encode()], fds)
        self.pid = int(forker.recv(64))
        self._ends = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return None while the process runs. The exit code is not known here, so it is 0 for every process that ended."""
        return 0 if select.select([self._ends], [], [], 0)[0] else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended. Raises subprocess.TimeoutExpired after `timeout_s`."""
        if not select.select([self._ends], [], [], timeout_s)[0]:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ends, number)


class ForkedEngine(Forked):
    """A forked process that runs `offload_child.py` with these options."""

    def __init__(self, options: Mapping[str, Any], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        its_stdin, our_stdin = os.pipe()
        our_stdout, its_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(our_stdin, "w"), os.fdopen(our_stdout)
        with log.open("wb") as errors:
            request = {"options": options, "folder": str(folder)}
            super().__init__(request, environment, [its_stdin, its_stdout, errors.fileno()])
        os.close(its_stdin)
        os.close(its_stdout)


class ForkedServer(Forked):
    """A forked process that runs vLLM's HTTP server with these arguments, in the present folder."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
            request = {"arguments": arguments, "folder": str(Path.cwd())}
            super().__init__(request, environment, [nothing.fileno(), output.fileno(), output.fileno()])


@functools.cache
def _forker(module: str, path: str) -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", module, str(its.fileno())]
    with its:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, pass_fds=[its.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(forker: socket.socket, run: Callable[[dict[str, Any]], None]) -> None:
    """Fork a process for each request, which runs `run` with the request, until the test process has ended."""
    # In the engines, the collector of garbage need not go through all that was imported, nor copy it by doing so.
    gc.collect()
    gc.freeze()
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
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        arguments = json.loads(request)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin = os.fdopen(0)
        os.chdir(arguments["folder"])
        os.environ.clear()
        os.environ.update(arguments["environment"])
        run(arguments)
        # Taking apart all imported modules would take some seconds. Engines close what they use themselves.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _serve_vllm(request: dict[str, Any]) -> None:
    from tests.engine import offload_child

    if "options" in request:
        offload_child.serve(request["options"])
    else:
        _serve_http(request["arguments"])


def _serve_http(arguments: list[str]) -> None:
    """Run vLLM's HTTP server, which forks its engine core, as it does on a GPU.

    On the CPU, vLLM would start the core as a new process, which imports vLLM again.
    """
    import vllm.v1.engine.utils
    from vllm.entrypoints.launchers.api_server.entry import main

    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["vllm", *arguments]
    main()


def _import_vllm() -> None:
    import vllm
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    import tests.engine.offload_child  # noqa: F401


if __name__ == "__main__":
    # A process that has looked at a CUDA device cannot be forked into one that uses the device.
    if not CUDA_DEVICE.exists():
        _import_vllm()
    serve(socket.socket(fileno=int(sys.argv[1])), _serve_vllm)
