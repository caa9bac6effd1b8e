# SPDX-License-Identifier: Apache-2.0
"""Workers go only to routers that exist and do not refuse them, as all routers show what the follower reports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrouter.router.follow.fleet.heartbeat import VERSION, Heartbeat, Hold, encode_heartbeat
from kvrouter.router.index.store import keys
from tests.support.churn import Churn
from tests.support.fleet import check, held, register, rows, until, wait_shared, wait_well
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

ENGINES = 4
RATE = 2_000.0
# Long enough for every router to look, and to hand over workers if it would.
SETTLED_S = 4.0


def live(router: RouterProcess) -> bool:
    shown = rows(router)
    return len(shown) == ENGINES and all(row["state"] == "live" and row["credited"] for row in shown.values())


def test_a_router_that_refuses_workers_gets_none_of_them(tmp_path: Path, server: StoreServer, churn: Churn) -> None:
    with RouterProcess(tmp_path / "a", ["--redis", server.url]) as one:
        register(one, churn)
        churn.ask("go")
        until(lambda: live(one), "the workers are not live")
        with RouterProcess(tmp_path / "b", ["--redis", server.url, "--allow-host", "10.0.0.0/8"]) as two:
            begun_s = time.monotonic()
            while time.monotonic() < begun_s + SETTLED_S:
                assert live(one), rows(one)
                time.sleep(0.05)
            assert held(one) == ENGINES and held(two) == 0
            check([one], server.client, churn)
            for row in rows(two).values():
                assert row["state"] == "down" and "allow_hosts" in row["reason"], row
            churn.ask("go")
            # A third router, which refuses no worker, gets its share.
            with RouterProcess(tmp_path / "c", ["--redis", server.url]) as three:
                wait_shared([one, three], ENGINES)
                check([one, three], server.client, churn)
                until(lambda: live(one) and live(three), "not all are live at both")
            assert one.metric("kvrouter_heartbeats_ignored_total") == 0


def heartbeat(count: int, **fields: Any) -> bytes:
    return encode_heartbeat(Heartbeat(count, VERSION, fields.get("holds", {}), fields.get("refuses", {})))


# Fields of the hash of routers that no router wrote, with their values.
FORGED: dict[str, tuple[bytes, bytes]] = {
    "future": (b"ghost", msgspec.msgpack.encode(9e15)),
    "text": (b"ghost", b"live until 2099"),
    "huge": (b"ghost", b"\xcf" + b"\xff" * 8),
    "token": (b"\xff\x00\xfe", heartbeat(1)),
    "stopped": (b"ghost", heartbeat(2**63, holds={f"{{m/w{n}}}": Hold(2**63, 0) for n in range(ENGINES)})),
}


@pytest.mark.parametrize("forged", FORGED)
def test_what_no_router_wrote_gets_no_worker(forged: str, tmp_path: Path, server: StoreServer, churn: Churn) -> None:
    field, value = FORGED[forged]
    with RouterProcess(tmp_path / "a", ["--redis", server.url]) as one:
        register(one, churn)
        churn.ask("go")
        until(lambda: live(one), "the workers are not live")
        server.client.hset(keys.ROUTERS, field, value)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + SETTLED_S:
            time.sleep(0.05)
        assert held(one) == ENGINES
        wait_well(one, ENGINES)
        check([one], server.client, churn)
        assert one.metric("kvrouter_heartbeats_ignored_total") == (0 if forged == "stopped" else 1)


def test_a_worker_that_all_refuse_is_down(tmp_path: Path, server: StoreServer, churn: Churn) -> None:
    with RouterProcess(tmp_path / "a", ["--redis", server.url]) as one:
        register(one, churn)
        churn.ask("go")
        until(lambda: live(one), "the workers are not live")
    refusing = ["--redis", server.url, "--allow-host", "10.0.0.0/8"]
    with RouterProcess(tmp_path / "b", refusing) as two, RouterProcess(tmp_path / "c", refusing) as three:
        for router in (two, three):
            for row in rows(router).values():
                assert row["state"] == "down" and "allow_hosts" in row["reason"] and not row["credited"]
        assert held(two) == held(three) == 0
