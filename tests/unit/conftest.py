# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of sockets and event loops, and a guard against subprocesses."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop
import zmq

from kvrouter.engine_patch.reporter import snapshots
from kvrouter.engine_patch.reporter.reporter import Reporter
from tests.support.report_peer import Peer, start
from tests.support.stub_router import StubRouter

Context = zmq.Context[zmq.Socket[bytes]]


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each asynchronous test of this folder once on each kind of event loop."""
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_factory")
        metafunc.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


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
def joined(context: Context, made: Callable[..., Reporter]) -> Iterator[Callable[..., tuple[Reporter, Peer, int]]]:
    """Provide a function that starts a reporter as `made` does, and joins it; it returns them and the next seq."""
    with ExitStack() as stack:

        def join(**changes: Any) -> tuple[Reporter, Peer, int]:
            reporter = made(**changes)
            peer = stack.enter_context(Peer(context, reporter))
            return reporter, peer, peer.joined(reporter)

        yield join


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a part to four hashes, so that a snapshot has many parts."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_PART_BLOCKS", 4)


@pytest.fixture
def stub() -> Iterator[StubRouter]:
    """Start a router that gives the answers that a test sets."""
    with StubRouter() as router:
        yield router
