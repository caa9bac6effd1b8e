# SPDX-License-Identifier: Apache-2.0
"""CURVE between a router and an engine's patch.

The right key works, a wrong one is reported, and without a key nothing is heard.
"""

from __future__ import annotations

import logging
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvrouter.engine_patch.reporter.reporter_start import start_reporter
from kvrouter.engine_patch.setup.client_gate import ClientList
from kvrouter.engine_patch.setup.features import Features
from kvrouter.engine_patch.setup.settings import from_environment
from kvrouter.events.patch.messages import REPORT_TOPIC, HelloRequest, reports_endpoint, requests_endpoint
from kvrouter.events.transport.curve import public_key, read_secret
from kvrouter.router.model.workers.worker_spec import patch_key_problem
from tests.support.fake_engine import hashes, prompt, stored
from tests.support.fleet import until
from tests.support.patched_engine import PatchedEngine, stores
from tests.support.router_process import RouterError, RouterProcess

TOKENS = prompt(1)
CHAIN = hashes(TOKENS)
WAIT_S = 30.0
# A plain peer would get an answer within milliseconds.
QUIET_MS = 1_500

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def engine(context: Context) -> Iterator[PatchedEngine]:
    patched_engine = PatchedEngine(context, patched=False)
    yield patched_engine
    patched_engine.close()


def told(row: dict[str, Any]) -> bool:
    return "proves the patch_key" in row["reason"]


def test_a_patch_is_followed_only_while_it_proves_the_registered_key(
    router: RouterProcess, engine: PatchedEngine
) -> None:
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    engine.patch(curve_secret=secret)
    assert engine.reporter is not None
    registration = engine.registration("w0", "m")
    try:
        # The right key works.
        router.request("POST", "/register", registration | {"patch_key": public.decode()})
        router.wait_row("w0", lambda row: row["patch"] is not None and row["state"] in ("live", "catching_up"))
        engine.report(stores(CHAIN[:4]))
        router.wait_row("w0", lambda row: sum(row["residency"].values()) == 4)

        # A wrong key is reported within seconds, earns no credit, and does not make the router follow the engine's
        # plain topic.
        router.request("POST", "/register", registration | {"patch_key": other.decode()})
        row = router.wait_row("w0", told)
        engine.publish(stored(TOKENS, 0, 8))
        time.sleep(1)
        assert told(router.worker("w0"))
        assert sum(router.worker("w0")["residency"].values()) <= 4
        assert secret.decode() not in str(row) + router.log_tail()

        # Without a key, the encrypted patch does not exist for the router, so it follows the engine's own topic.
        router.unregister("w0")
        router.request("POST", "/register", registration)
        row = router.wait_row("w0", lambda row: row["state"] not in ("connecting", "down"))
        assert row["patch"] is None

        # A router with a key does not accept a plain engine.
        router.unregister("w0")
        engine.reporter.close()
        engine.patch()
        router.request("POST", "/register", registration | {"patch_key": public.decode()})
        router.wait_row("w0", told)
        assert sum(router.worker("w0")["residency"].values()) == 0

        # The engine can be mended without registering the worker again.
        engine.reporter.close()
        engine.patch(curve_secret=secret)
        router.wait_row("w0", lambda row: row["patch"] is not None and not told(row))
        engine.report(stores(CHAIN[:4]))
        router.wait_row("w0", lambda row: sum(row["residency"].values()) == 4)
    finally:
        engine.reporter.close()
        router.unregister("w0")


def test_a_plain_client_gets_nothing_from_an_encrypted_patch(context: Context, engine: PatchedEngine) -> None:
    def hears(public: bytes | None) -> tuple[bool, bool]:
        requests, reports = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        try:
            for socket, endpoint in (
                (requests, requests_endpoint(engine.endpoint)),
                (reports, reports_endpoint(engine.endpoint)),
            ):
                if public is not None:
                    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                    socket.curve_serverkey = public
                assert endpoint is not None
                socket.connect(endpoint)
            reports.subscribe(REPORT_TOPIC)
            requests.send_multipart([b"", msgspec.msgpack.encode(HelloRequest(1))])
            # Heartbeats come ten times a second.
            return bool(reports.poll(QUIET_MS)), bool(requests.poll(QUIET_MS))
        finally:
            requests.close(linger=0)
            reports.close(linger=0)

    public, secret = zmq.curve_keypair()
    engine.patch(curve_secret=secret)
    assert engine.reporter is not None
    try:
        assert hears(None) == (False, False)
        assert hears(zmq.curve_keypair()[0]) == (False, False)
        assert hears(public) == (True, True)
    finally:
        engine.reporter.close()


def test_a_file_that_is_no_key_file_is_reported_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "key"
    _, secret = zmq.curve_keypair()
    file.write_bytes(secret + b"\n")
    file.chmod(stat.S_IRUSR)
    assert read_secret(str(file)) == secret
    wrong = tmp_path / "wrong"
    wrong.write_bytes(secret[:-1])
    with pytest.raises(ValueError, match="holds no CURVE key") as caught:
        read_secret(str(wrong))
    assert secret[:10].decode() not in str(caught.value)
    with pytest.raises(ValueError, match="No such file"):
        read_secret(str(tmp_path / "none"))


def test_a_patch_key_that_is_none_is_refused(router: RouterProcess, engine: PatchedEngine) -> None:
    public, _ = zmq.curve_keypair()
    assert patch_key_problem(public.decode(), None) is None
    for more in ({"patch_key": "short"}, {"patch_key": public.decode(), "patch_endpoint": "off"}):
        with pytest.raises(RouterError, match=r"400.*patch_key"):
            router.request("POST", "/register", engine.registration("w9", "m") | more)


# Lists of the clients that a patch admits.


def write(file: Path, text: str) -> None:
    """Replace the file at once, as a ConfigMap changes."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.rename(file)


def test_a_patch_with_a_list_admits_those_alone(engine: PatchedEngine, tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    key_file, clients = tmp_path / "client.key", tmp_path / "clients"
    key_file.write_bytes(client_secret + b"\n")
    key_file.chmod(stat.S_IRUSR)
    clients.write_text(f"# routers\n{client_public.decode()} router-a\n")
    engine.patch(curve_secret=secret, clients=ClientList(str(clients)))
    assert engine.reporter is not None
    registration = engine.registration("w0", "m") | {"patch_key": public.decode()}
    with (
        RouterProcess(tmp_path / "a", ["--curve-client-key", str(key_file)]) as listed,
        RouterProcess(tmp_path / "b") as without,
    ):
        for router in (listed, without):
            router.request("POST", "/register", registration)
        listed.wait_row("w0", lambda row: row["patch"] is not None and row["state"] in ("live", "catching_up"))
        engine.report(stores(CHAIN[:4]))
        listed.wait_row("w0", lambda row: sum(row["residency"].values()) == 4)
        # The router without a key learns why it is refused, and what to do.
        without.wait_row("w0", lambda row: "has no key of its own: set curve_client_key" in row["reason"])
        assert sum(without.worker("w0")["residency"].values()) == 0
        assert engine.reporter.counters.clients_refused > 0
        # The engine goes on reporting, whichever router is refused.
        engine.report(stores(CHAIN[4:8]))
        listed.wait_row("w0", lambda row: sum(row["residency"].values()) == 8)

        # A router that is taken off the list stays until its connection ends. It is then refused, and the reason names
        # its public key.
        write(clients, "# nobody\n")
        engine.reporter.close()
        engine.patch(curve_secret=secret, clients=ClientList(str(clients)))
        listed.wait_row("w0", lambda row: f"add its public key {client_public.decode()} to the file" in row["reason"])
        # A router that is added to the list is admitted without a restart of the router or the engine.
        write(clients, client_public.decode())
        listed.wait_row("w0", lambda row: row["patch"] is not None and not row["reason"].startswith("the engine patch"))
        engine.report(stores(CHAIN[:4]))
        listed.wait_row("w0", lambda row: sum(row["residency"].values()) == 4)
        shown = listed.log_tail() + str(listed.worker("w0"))
        assert client_secret.decode() not in shown and secret.decode() not in shown


def test_the_engines_thread_waits_for_no_handshake(engine: PatchedEngine, context: Context, tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    clients = tmp_path / "clients"
    clients.write_text("")
    client_list = ClientList(str(clients))
    begun, release = threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        release.wait(WAIT_S)

    client_list.refresh = stand_still  # type: ignore[method-assign,assignment]
    engine.patch(curve_secret=secret, clients=client_list)
    assert engine.reporter is not None
    socket = context.socket(zmq.DEALER)
    try:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = public
        endpoint = requests_endpoint(engine.endpoint)
        assert endpoint is not None
        socket.connect(endpoint)
        assert begun.wait(WAIT_S)
        sent = engine.reporter.counters.sent
        for number in range(100):
            engine.report(stores(CHAIN[: number % 8 + 1]))
        counters = engine.reporter.counters
        until(lambda: counters.sent >= sent + 100, "the reporter waits for a client to be judged")
    finally:
        release.set()
        socket.close(linger=0)
        engine.reporter.close()


def test_a_list_that_breaks_keeps_the_former(engine: PatchedEngine, context: Context, tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    mine, clients = zmq.curve_keypair(), tmp_path / "clients"
    clients.write_text(mine[0].decode())
    engine.patch(curve_secret=secret, clients=ClientList(str(clients)))
    assert engine.reporter is not None

    def is_admitted(pair: tuple[bytes, bytes]) -> bool:
        socket = context.socket(zmq.DEALER)
        try:
            socket.curve_publickey, socket.curve_secretkey = pair
            socket.curve_serverkey = public
            endpoint = requests_endpoint(engine.endpoint)
            assert endpoint is not None
            socket.connect(endpoint)
            socket.send_multipart([b"", msgspec.msgpack.encode(HelloRequest(1))])
            return bool(socket.poll(QUIET_MS))
        finally:
            socket.close(linger=0)

    other = zmq.curve_keypair()
    try:
        assert is_admitted(mine) and not is_admitted(other)
        for broken in ("no key", None):
            if broken is None:
                clients.unlink()
            else:
                write(clients, broken)
            assert is_admitted(mine) and not is_admitted(other)
        write(clients, other[0].decode() + " another router\n")
        assert is_admitted(other) and not is_admitted(mine)
        assert engine.reporter.counters.clients_refused == 4
    finally:
        engine.reporter.close()


def test_a_list_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "clients"
    with pytest.raises(ValueError, match="No such file"):
        ClientList(str(file))
    key = zmq.curve_keypair()[0].decode()
    for text, message in ((f"{key}\nshort\n", "line 2 has no public key"), ("\xfc", "is not ASCII")):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=message):
            ClientList(str(file))
    # A key may begin with #, as a comment does.
    file.write_text(f"#{key[1:]}\n# {key}\n#{key}\n\n  {key} name\n")
    client_list = ClientList(str(file))
    assert client_list.admits(key.encode()) and client_list.admits(b"#" + key[1:].encode())


def test_the_public_key_follows_from_the_secret_one() -> None:
    public, secret = zmq.curve_keypair()
    assert public_key(secret) == public.decode()


class Publisher:
    """The parts of an engine's publisher that the start of a reporter reads."""

    _endpoint = "inproc://events"
    _dp_rank = 0


def test_an_engine_reports_nothing_rather_than_to_all(tmp_path: Path) -> None:
    key, clients = tmp_path / "key", tmp_path / "clients"
    key.write_bytes(zmq.curve_keypair()[1])
    places = {name: f"ipc://{tmp_path}/{name}" for name in ("REQUESTS", "REPORTS")}

    def started(**named: Path) -> tuple[bool, str]:
        environment = {f"KVROUTER_PATCH_{name}": str(value) for name, value in (places | named).items()}
        settings, wrong = from_environment(environment)
        assert not wrong
        features = Features(logging.getLogger("test"))
        reporter = start_reporter(settings, Publisher(), features, Publisher._endpoint)
        if reporter is not None:
            reporter.close()
        return reporter is not None, features["reports"].state

    assert started(CURVE_KEY=key)[0]
    runs, state = started(CURVE_KEY=key, CURVE_CLIENTS=clients)
    assert not runs and "No such file" in state and "Nothing is reported" in state
    clients.write_text("")
    assert started(CURVE_KEY=key, CURVE_CLIENTS=clients) == (True, "on")
    runs, state = started(CURVE_CLIENTS=clients)
    assert not runs and "needs KVROUTER_PATCH_CURVE_KEY" in state
