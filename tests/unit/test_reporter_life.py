# SPDX-License-Identifier: Apache-2.0
"""Start, failures and end of a reporter, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvrouter.engine_patch.reporter import reporter as reporter_module
from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.events.transport import binding
from tests.support.report_peer import ANY, CATALOG, Peer, Plug, eventually, reporting, said, start, stored, takes

Context = zmq.Context[zmq.Socket[bytes]]
Join = Callable[..., tuple[Reporter, Peer, int]]


@pytest.fixture(autouse=True)
def rebinding_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "REBIND_TIMEOUT_S", 0.1)


class FailingPub:
    """Context whose PUB socket fails as often as the test says."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.failures = 0

    def socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        if kind == zmq.PUB:
            self._pub = socket
            return self
        return socket

    def send_multipart(self, *arguments: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("broken")
        self._pub.send_multipart(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pub, name)


def test_a_turn_that_fails_begins_a_new_epoch_and_ten_end_the_reporter(context: Context, joined: Join) -> None:
    failing = FailingPub(context)
    reporter, peer, _ = joined(context=failing)
    failing.failures = 1
    reporter.publish(said(), 1)
    eventually(lambda: peer.hello().epoch == f"{1:016x}")
    failing.failures = 1_000_000
    # In the end nothing takes a message, so nothing may pile up.
    eventually(lambda: not takes(reporter) and not reporting())
    reporter.declare(CATALOG)


def test_a_taken_reports_port_is_replaced_by_a_free_one(context: Context, made: Callable[..., Reporter]) -> None:
    with context.socket(zmq.PUB) as blocker:
        blocker.bind(ANY)
        taken_endpoint = blocker.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        reporter = made(reports=taken_endpoint)
        with Peer(context, reporter) as peer:
            assert peer.hello().reports == reporter.reports_endpoint != taken_endpoint
            assert reporter.reports_endpoint.startswith("tcp://127.0.0.1:")
            peer.joined(reporter)


@pytest.mark.parametrize("which", ["requests", "reports"])
def test_an_endpoint_that_cannot_be_bound_is_an_error(context: Context, which: str) -> None:
    threads = threading.active_count()
    with context.socket(zmq.PUB) as blocker:
        blocker.bind("inproc://taken")
        with pytest.raises(zmq.ZMQError):
            start(context, **{which: "inproc://taken"})
    assert threading.active_count() == threads


def test_a_successor_binds_the_same_ports(context: Context, made: Callable[..., Reporter]) -> None:
    first = made()
    first.close()
    second = made(requests=first.requests_endpoint, reports=first.reports_endpoint)
    assert (second.requests_endpoint, second.reports_endpoint) == (first.requests_endpoint, first.reports_endpoint)


@pytest.mark.parametrize("scheme", ["ipc", "inproc", "ipv6"])
def test_ipc_inproc_and_ipv6_endpoints_work(
    context: Context, made: Callable[..., Reporter], tmp_path: Path, scheme: str
) -> None:
    if scheme == "ipv6":
        requests = reports = "tcp://[::]:*"
    else:
        requests, reports = f"{scheme}://{tmp_path}/q", f"{scheme}://{tmp_path}/r"
    reporter = made(requests=requests, reports=reports)
    if scheme == "ipv6":
        reporter.requests_endpoint = reporter.requests_endpoint.replace("[::]", "127.0.0.1")
        reporter.reports_endpoint = reporter.reports_endpoint.replace("[::]", "127.0.0.1")
    with Peer(context, reporter) as peer:
        peer.joined(reporter)


def test_close_sends_what_is_queued_and_ends(joined: Join) -> None:
    reporter, peer, seq = joined()
    for number in range(50):
        reporter.publish(said(stored([number])), number)
    reporter.close()
    assert not reporting()
    reporter.close()
    assert not takes(reporter)
    reporter.declare(CATALOG)
    assert [peer.next_events()[0] for _ in range(50)] == list(range(seq, seq + 50))


def test_close_ends_a_reporter_that_is_busy(
    context: Context, made: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "TURN_MESSAGES", 1)
    reporter = made()
    plug = Plug(reporter)
    reporter.publish(said(), 1)
    closing = threading.Thread(target=reporter.close)
    closing.start()
    eventually(lambda: not takes(reporter))
    plug.pull()
    closing.join()
    assert not reporting()


def test_close_does_not_wait_for_a_stuck_thread(
    context: Context, made: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "JOIN_S", 0.01)
    reporter = made()
    plug = Plug(reporter)
    reporter.close()
    assert reporting()
    plug.pull()
    monkeypatch.undo()


def test_a_terminated_context_ends_the_thread(made: Callable[..., Reporter]) -> None:
    own_context: Context = zmq.Context()
    reporter = made(context=own_context)
    # The call waits for the thread to close its sockets.
    own_context.term()
    eventually(lambda: not reporting())
    assert not takes(reporter)
    reporter.close()
