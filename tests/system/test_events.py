# SPDX-License-Identifier: Apache-2.0
"""`GET /events` of whole routers: each client gets every event once, whichever router follows the worker.

The events add up to the blocks that the engines hold.
"""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.churn import KINDS, Churn
from tests.support.event_reader import EventReader
from tests.support.fleet import paused, register, rows, until, until_right, wait_seqs
from tests.support.flooding import begin, flood
from tests.support.router_process import RouterError, RouterProcess
from tests.support.store_server import StoreServer

ENGINES = 4
RATE = 4_000


def differences(reader: EventReader, churn: Churn, truth: dict[str, Any]) -> list[str]:
    """Return where the sum of the events differs from the blocks that the engines hold."""
    wrong = []
    for number, worker in enumerate(churn.workers):
        for group in range(len(KINDS)):
            expected, held = set(truth["held"][number][group]), reader.held[worker][group]
            if expected != held:
                wrong.append(f"{worker} group {group}: {len(held - expected)} too many, {len(expected - held)} missing")
    return wrong


def wait_added_up(readers: list[EventReader], churn: Churn, truth: dict[str, Any]) -> None:
    for reader in readers:
        wrong = until_right(lambda reader=reader: differences(reader, churn, truth))  # type: ignore[misc]
        others = [event for event in reader.events if event["type"] not in ("stored", "removed")]
        assert not wrong, "\n".join([*wrong, *map(str, others)])


def test_the_events_of_every_router_add_up_to_what_the_engines_hold(tmp_path: Path, server: StoreServer) -> None:
    with ExitStack() as stack:
        churn = stack.enter_context(Churn(ENGINES, RATE))
        routers = [stack.enter_context(RouterProcess(tmp_path / name, ["--redis", server.url])) for name in "ab"]
        until(lambda: all(router.metric("kvrouter_routers") == 2 for router in routers), "the routers meet")
        readers = [stack.enter_context(EventReader(router.port, "?hashes=true")) for router in routers]
        counting = stack.enter_context(EventReader(routers[0].port, "?type=stored&worker=w1"))
        register(routers[0], churn)
        churn.ask("go")
        until(lambda: all(len(reader.events) > 500 for reader in readers), "events come")
        # Drop batches, which then come by replay only: the worker's follower has a gap, and every client gets that
        # event.
        churn.ask("drop")
        until(lambda: all(reader.of("gap") and reader.of("resync") for reader in readers), "the gap is shown")
        seqs = paused(churn)
        truth = churn.ask("dump")
        for router in routers:
            wait_seqs(router, seqs)
        wait_added_up(readers, churn, truth)
        for router, reader in zip(routers, readers, strict=True):
            assert not reader.contradictions and not reader.of("lost")
            assert {event["worker_id"] for event in reader.of("state")} == set(churn.workers)
            assert sum(event["count"] for event in reader.of("gap")) == sum(
                row["gaps"] for row in rows(router).values()
            )
            last = {event["worker_id"]: event["seq"] for event in reader.of("stored") + reader.of("removed")}
            assert all(last[worker] <= seq for worker, seq in seqs.items())
        assert {event["worker_id"] for event in counting.events} == {"w1"} == {*counting.held}
        assert all(event["type"] == "stored" and "block_hashes" not in event for event in counting.events)
        routers[1].request("POST", "/unregister", {"worker_id": churn.workers[0]})
        gone = {"worker_id": churn.workers[0], "state": "unregistered"}
        until(
            lambda: all(any(gone.items() <= event.items() for event in reader.of("state")) for reader in readers),
            "the end of a worker is shown",
        )


def test_a_client_that_comes_back_misses_nothing_and_hears_of_a_restart(tmp_path: Path) -> None:
    with Churn(2, 2_000) as churn:
        with RouterProcess(tmp_path) as router:
            with EventReader(router.port, "?hashes=true") as first:
                register(router, churn)
                churn.ask("go")
                until(lambda: len(first.events) > 200, "events come")
            with EventReader(router.port, "?hashes=true", first) as second:
                until(lambda: len(second.events) > 200, "events come again")
                seqs = paused(churn)
                truth = churn.ask("dump")
                wait_seqs(router, seqs)
                wait_added_up([second], churn, truth)
                assert not second.contradictions and not second.of("lost")
                router.signal(signal.SIGTERM)
                until(lambda: second.ended, "the stream ends with its router")
                assert any("shutting down" in comment for comment in second.comments)
        with RouterProcess(tmp_path) as router, EventReader(router.port, "", second) as third:
            until(lambda: third.of("lost"), "what is lost is said")
            assert "restart" in third.events[0]["reason"]


def test_the_stream_is_behind_the_key(tmp_path: Path) -> None:
    with RouterProcess(tmp_path, ["--api-key", "secret"]) as router, EventReader(router.port) as reader:
        assert reader.answer.status == 401


@pytest.mark.parametrize(
    ("method", "query", "status"), [("POST", "", 405), ("GET", "?type=born", 400), ("GET", "?x=1", 400)]
)
def test_wrong_requests_are_refused(router: RouterProcess, method: str, query: str, status: int) -> None:
    with pytest.raises(RouterError, match=f"gave {status}: .*message"):
        router.request(method, f"/events{query}")


def test_a_client_that_hangs_up_is_forgotten(router: RouterProcess) -> None:
    with EventReader(router.port):
        until(lambda: router.metric("kvrouter_feed_subscribers") == 1, "it is counted")
    until(lambda: router.metric("kvrouter_feed_subscribers") == 0, "it is forgotten")


def test_a_stop_does_not_wait_for_those_who_watch(tmp_path: Path) -> None:
    with RouterProcess(tmp_path, ["--drain-s", "600"]) as router, EventReader(router.port) as reader:
        until(lambda: reader.last_id, "it reads")
        router.signal(signal.SIGTERM)
        assert router.wait() == 0
        until(lambda: reader.ended, "the stream ends")


IDLE_CLIENTS = 64
# The most memory that idle clients may add to the router: the events that all share, and a piece in the connection of
# each. With copies for each client, it would be IDLE_CLIENTS times MAX_UNREAD_BYTES, which is a gigabyte.
MAX_ADDED_BYTES = 200 * 1024**2
FLOODED_BATCHES = 1_000


def peak_bytes(pid: int) -> int:
    """Return the most memory that the process had resident. Source: proc(5), VmHWM."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_clients_that_read_nothing_share_their_memory_and_are_cut(tmp_path: Path) -> None:
    with ExitStack() as stack:
        router = stack.enter_context(RouterProcess(tmp_path / "router"))
        port, flooder = stack.enter_context(flood(5_000))
        router.request("POST", "/register", {"worker_id": "w", "model": "m", "endpoint": f"tcp://127.0.0.1:{port}"})
        router.wait_connected("w")
        begin(flooder)
        # Measure after the flood, which costs memory too.
        router.wait_seen("w", FLOODED_BATCHES)
        before = peak_bytes(router.pid)
        for _ in range(IDLE_CLIENTS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", router.port))
            client.sendall(b"GET /events?hashes=true HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        until(lambda: router.metric("kvrouter_feed_subscribers_cut_total") == IDLE_CLIENTS, "the clients are cut")
        assert peak_bytes(router.pid) - before < MAX_ADDED_BYTES
        assert router.metric("kvrouter_feed_unread_bytes") == 0
        assert router.metric("kvrouter_feed_subscribers") == 0
