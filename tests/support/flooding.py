# SPDX-License-Identifier: Apache-2.0
"""Runners for the programs in this folder that flood a router, each in its own process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def flooding(program: str, *arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a program of this folder that prints its port first; yield the port and the process."""
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def flood(blocks: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run `flooder.py`, which starts to publish at a line on its stdin; yield its port and process."""
    with flooding("flooder.py", str(blocks)) as running:
        yield running


def begin(flooder: subprocess.Popen[bytes]) -> None:
    """Let `flooder.py` publish."""
    assert flooder.stdin is not None
    flooder.stdin.write(b"go\n")
    flooder.stdin.flush()
