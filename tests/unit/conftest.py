# SPDX-License-Identifier: Apache-2.0
"""What tests of sockets and event loops share."""

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

# Nothing here waits this long unless it fails.
PATIENCE_S = 15.0


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen.__init__

    def refuse(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        # matplotlib asks fontconfig for the fonts, once a machine.
        if isinstance(args, list) and args[0] == "fc-list":
            return start(process, args, *rest, **options)
        raise AssertionError("a unit test starts no process; tests/contract and tests/system do")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture
def context() -> Iterator[Context]:
    """Every socket of it must be closed when the test ends."""
    context: Context = zmq.Context()
    yield context
    open_sockets = [socket for socket in context._sockets if not socket.closed]
    context.destroy(linger=0)
    assert open_sockets == []


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a test on each kind of event loop."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test, PATIENCE_S))

    return run


@pytest.fixture
def made(context: Context) -> Iterator[Callable[..., Reporter]]:
    """`start` of a reporter, closed at the end of the test."""
    reporters: list[Reporter] = []

    def make(**changes: Any) -> Reporter:
        reporters.append(start(**{"context": context, **changes}))
        return reporters[-1]

    yield make
    for reporter in reporters:
        reporter.close()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hashes a part, so that a snapshot has many."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_PART_BLOCKS", 4)
