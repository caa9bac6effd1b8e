# SPDX-License-Identifier: Apache-2.0
"""A private network with its own host names, for commands that use fixed ports, addresses and hosts.

Programs in it and the machine's other programs cannot reach each other. It needs unshare and nsenter (util-linux), and
either root or a kernel that allows user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

# Bring the loopback device up, with 10.0.0.0/8 beside 127.0.0.0/8: on it the kernel accepts every address of a network.
_SET_UP = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x41))                # SIOCSIFFLAGS: up, running
    address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton("10.0.0.1"))
    fcntl.ioctl(control, 0x8916, struct.pack("16s16s", b"lo:0", address))            # SIOCSIFADDR
"""


class OwnNetwork:
    """A network that is made on entry; on exit all processes that still run in it are killed."""

    def __init__(self, folder: Path, hosts: Mapping[str, str]) -> None:
        """Prepare the network.

        Args:
            folder: Takes the file of host names.
            hosts: Addresses by host name.
        """
        self._folder = folder
        self._hosts = hosts
        self._holder: subprocess.Popen[str] | None = None
        self._enter: list[str] = []

    def __enter__(self) -> Self:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *user, "--net", "--mount", "sh", "-c", "echo up; exec sleep infinity"]
        try:
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except FileNotFoundError:
            pytest.skip("no unshare: apt-get install util-linux")
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if not self._holder.stdout.readline():
            problem = self._holder.stderr.read().strip()
            self.__exit__()
            pytest.skip(f"no namespaces here: {problem}")
        user_options = ["--user", "--preserve-credentials"] if user else []
        self._enter = ["nsenter", "--target", str(self._holder.pid), *user_options, "--net", "--mount", "--"]
        hosts = self._folder / "hosts"
        names = {"localhost": "127.0.0.1", **self._hosts}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        for step in ([sys.executable, "-c", _SET_UP], ["mount", "--bind", str(hosts), "/etc/hosts"]):
            process = subprocess.run([*self._enter, *step], capture_output=True, text=True, check=False)
            assert process.returncode == 0, process.stderr
        return self

    def __exit__(self, *_: object) -> None:
        holder, self._holder = self._holder, None
        if holder is None:
            return
        for pid in _inside(holder.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.wait()
        for pipe in (holder.stdout, holder.stderr):
            if pipe is not None:
                pipe.close()

    def start(self, script: str, folder: Path, environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start a bash script in `folder`, in its own process group, with its output written to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self._command(script, folder), env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def run(
        self, script: str, folder: Path, environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(script, folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )

    def _command(self, script: str, folder: Path) -> Sequence[str]:
        # nsenter changes the current folder.
        return [*self._enter, "bash", "-euo", "pipefail", "-c", f"cd {folder}\n{script}"]


def _inside(holder: int) -> list[int]:
    """Return the ids of the processes in the network of process `holder`, `holder` included."""
    pids = []
    with contextlib.suppress(OSError):
        network = Path(f"/proc/{holder}/ns/net").readlink()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/net").readlink() == network:
                    pids.append(int(entry.name))
    return pids


def interrupt(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Interrupt a process group as Ctrl-C does, and return the exit code, even if the process had already ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
