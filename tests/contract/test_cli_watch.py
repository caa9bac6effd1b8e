# SPDX-License-Identifier: Apache-2.0
"""`kvrouter workers --watch` as a process: on a pipe and on a terminal, until Ctrl-C."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from signal import SIGINT

import pytest

from tests.support.stub_router import LOAD, WORKER, StubRouter, loads

INTERRUPTED = 130
CTRL_C = b"\x03"
# The sequences that switch a terminal to its second screen and back.
SECOND_SCREEN, FIRST_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def stub() -> Iterator[StubRouter]:
    with StubRouter() as router:
        router.answer("/workers", {"workers": [WORKER]})
        router.answer("/loads", loads(LOAD))
        yield router


def command(url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "kvrouter.router.cli", "workers", "--url", url, "--watch", "0.05", *more]


def watching(url: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(url, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_on_a_pipe_it_prints_block_after_block_until_ctrl_c(
    stub: StubRouter,
) -> None:
    with watching(stub.url) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = iter(process.stdout.readline, "")
        for _ in range(2):
            assert next(line for line in lines if line.startswith("w0@1"))
        stub.answers["/workers"] = (200, b"[1]")
        assert next(line for line in lines if "check --url" in line)
        stub.answer("/workers", {"workers": [WORKER]})
        assert next(line for line in lines if line.startswith("w0@1"))
        process.send_signal(SIGINT)
        assert process.wait() == INTERRUPTED
        assert "Traceback" not in process.stderr.read()


def test_as_json_it_prints_answer_after_answer(stub: StubRouter) -> None:
    with watching(stub.url, "--json") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        for _ in range(2):
            assert next(line for line in lines if line == "{\n")
        process.send_signal(SIGINT)
        assert process.wait() == INTERRUPTED


def test_a_first_failure_ends_the_command(stub: StubRouter) -> None:
    stub.answers["/workers"] = (500, b"")
    with watching(stub.url) as process:
        assert process.wait() == 1


def test_on_a_terminal_it_draws_in_place_and_gives_the_screen_back(stub: StubRouter) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command(stub.url), {**os.environ, "TERM": "xterm-256color"})
    shown = b""
    while shown.count(b"w0@1") < 3:
        shown += os.read(terminal, 65_536)
    os.write(terminal, CTRL_C)
    try:
        while more := os.read(terminal, 65_536):
            shown += more
    except OSError:
        # Linux reports the end of the terminal's program as an error.
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == INTERRUPTED
    assert shown.count(SECOND_SCREEN) == 1 and shown.index(SECOND_SCREEN) < shown.index(b"w0@1")
    assert shown.rindex(FIRST_SCREEN) > shown.rindex(b"w0@1") and b"Traceback" not in shown
