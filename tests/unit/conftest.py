# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of sockets and event loops, and a guard against subprocesses."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
import zmq

from kvrouter.engine_patch.reporter import snapshots
from kvrouter.engine_patch.reporter.reporter import Reporter
from tests.support.report_peer import start

Context = zmq.Context[zmq.Socket[bytes]]

# Only a failing test waits this long.
PATIENCE_S = 15.0


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen.__init__

    def refuse(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        # matplotlib runs fontconfig's fc-list once on a machine, to find the fonts.
        if isinstance(args, list) and args[0] == "fc-list":
            return start(process, args, *rest, **options)
        raise AssertionError("a unit test starts no process; tests/contract and tests/system do")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture
def context() -> Iterator[Context]:
    """Provide a context, all of whose sockets must be closed when the test ends."""
    context: Context = zmq.Context()
    yield context
    open_sockets = [socket for socket in context._sockets if not socket.closed]
    context.destroy(linger=0)
    assert open_sockets == []


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a test, once on each kind of event loop."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test, PATIENCE_S))

    return run


@pytest.fixture
def made(context: Context) -> Iterator[Callable[..., Reporter]]:
    """Provide `start` for reporters, and close every reporter at the end of the test."""
    reporters: list[Reporter] = []

    def make(**changes: Any) -> Reporter:
        reporters.append(start(**{"context": context, **changes}))
        return reporters[-1]

    yield make
    for reporter in reporters:
        reporter.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a part to four hashes, so that a snapshot has many parts."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_PART_BLOCKS", 4)
