# SPDX-License-Identifier: Apache-2.0
"""CURVE between a router and an engine's patch: the right key works, a wrong one is reported, and without one nothing
is heard."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_engine import hashes, prompt, stored
from patched_engine import PatchedEngine, stores
from router_process import RouterError, RouterProcess

from kvrouter.engine_patch.setup.curve_key import read_secret
from kvrouter.events.patch.messages import REPORT_TOPIC, HelloRequest, reports_endpoint, requests_endpoint
from kvrouter.router.workers.worker_spec import patch_key_problem

TOKENS = prompt(1)
CHAIN = hashes(TOKENS)
WAIT_S = 30.0
# A plain peer would get an answer within milliseconds.
QUIET_MS = 1_500

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def engine(context: Context) -> Iterator[PatchedEngine]:
    made = PatchedEngine(context, patched=False)
    yield made
    made.close()


def until(router: RouterProcess, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while not reached(row := router.worker("w0")):
        assert time.monotonic() < deadline, f"{row}\n{router.log_tail()}"
        time.sleep(0.02)
    return row


def told(row: dict[str, Any]) -> bool:
    return "proves the patch_key" in row["reason"]


def test_keys(router: RouterProcess, engine: PatchedEngine) -> None:
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    engine.patch(curve_secret=secret)
    assert engine.reporter is not None
    known = engine.registration("w0", "m")
    try:
        # The right key.
        router.request("POST", "/register", known | {"patch_key": public.decode()})
        until(router, lambda row: row["patch"] is not None and row["state"] in ("live", "catching_up"))
        engine.report(stores(CHAIN[:4]))
        until(router, lambda row: sum(row["residency"].values()) == 4)

        # Another one: reported within seconds, nothing credited, and the engine's plain topic is not listened to in its
        # place.
        router.request("POST", "/register", known | {"patch_key": other.decode()})
        row = until(router, told)
        engine.publish(stored(TOKENS, 0, 8))
        time.sleep(1)
        assert told(router.worker("w0"))
        assert sum(router.worker("w0")["residency"].values()) <= 4
        assert secret.decode() not in str(row) + router.log_tail()

        # None: the encrypted patch is not there for a plain router, so the engine's own topic is followed.
        router.unregister("w0")
        router.request("POST", "/register", known)
        row = until(router, lambda row: row["state"] not in ("connecting", "down"))
        assert row["patch"] is None

        # A plain engine is not accepted by who has a key.
        router.unregister("w0")
        engine.reporter.close()
        engine.patch()
        router.request("POST", "/register", known | {"patch_key": public.decode()})
        until(router, told)
        assert sum(router.worker("w0")["residency"].values()) == 0

        # And what was wrong can be mended without registering again.
        engine.reporter.close()
        engine.patch(curve_secret=secret)
        until(router, lambda row: row["patch"] is not None and not told(row))
        engine.report(stores(CHAIN[:4]))
        until(router, lambda row: sum(row["residency"].values()) == 4)
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


def test_a_key_file_that_is_none_is_told_without_its_content(tmp_path: Path) -> None:
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
