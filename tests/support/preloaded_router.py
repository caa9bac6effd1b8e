# SPDX-License-Identifier: Apache-2.0
"""A router forked from a process that has already imported its modules, as imports take most of a start's time.

Each test process has one such process, Python's own fork server. The forked router runs the same command line with the
same environment, folder and log as a newly started process would.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


class PreloadedRouter:
    """`kvrouter ARGUMENTS` as a process, with the parts of `subprocess.Popen` that tests use.

    Its output goes to the file `log`.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "kvrouter.router.app.cli.commands",
                "kvrouter.router.app.server.app",
                "kvrouter.router.app.server.supervisor",
                __name__,
            ]
        )
        with pytest.MonkeyPatch.context() as patch:
            # The fork server imports the modules before it receives our search path.
            patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
            multiprocessing.forkserver.ensure_running()
        self._arguments = arguments
        # A daemon ends with the test process, even if a test left it running.
        self._process = context.Process(target=_run, args=(arguments, dict(environment), folder, log), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end and return the exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired([*self._arguments], timeout_s)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    # The fork server has imported this module at its start.
    from kvrouter.router.app.cli import commands

    commands.main([*arguments])
