# SPDX-License-Identifier: Apache-2.0
"""Programs of this folder that flood a router, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def flooding(program: str, *arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a program that prints its port first; yield the port and the process."""
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
    """Run a publisher that never waits and begins at a line on its stdin."""
    with flooding("flooder.py", str(blocks)) as running:
        yield running
