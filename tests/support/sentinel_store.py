# SPDX-License-Identifier: Apache-2.0
"""A primary, a replica, and three Sentinels that watch them, all with passwords."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import redis

from tests.support.store_server import StoreServer

PASSWORD, SENTINEL_PASSWORD = "pa/ss@word", "sen&tinel"
SERVICE = "kv-index"
SENTINELS = 3
# A primary that does not answer for this long is down; it is short, as the tests wait for it.
DOWN_AFTER_MS = 1_000
# A Sentinel that got no processor time for two seconds does not act for thirty seconds (TILT).
AGREEMENT_S = 90.0


class SentinelStore:
    """The servers, which run from entry to exit; `primary` and `replica` name their roles at the start."""

    def __init__(self, folder: Path) -> None:
        login = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
        self.primary = StoreServer(folder / "primary", *login)
        self.replica = StoreServer(folder / "replica", *login, "--replicaof", f"127.0.0.1 {self.primary.port}")
        for server in (self.primary, self.replica):
            server.client = redis.Redis(port=server.port, password=PASSWORD, socket_timeout=5.0)
        self.sentinels = [self._sentinel(folder / f"sentinel-{number}") for number in range(SENTINELS)]
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis+sentinel://:{quote(PASSWORD, safe='')}@{hosts}/{SERVICE}/0"
        self.url += f"?sentinel_password={quote(SENTINEL_PASSWORD)}"
        self._stack = contextlib.ExitStack()

    def _sentinel(self, folder: Path) -> StoreServer:
        folder.mkdir(parents=True)
        # A Sentinel rewrites its file of settings, so each has a separate one.
        settings = folder / "sentinel.conf"
        settings.write_text(
            f"requirepass {SENTINEL_PASSWORD}\n"
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} {SENTINELS // 2 + 1}\n"
            f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 6000\n"
        )
        sentinel = StoreServer(folder, "--sentinel", settings=settings)
        sentinel.client = redis.Redis(port=sentinel.port, password=SENTINEL_PASSWORD, socket_timeout=5.0)
        return sentinel

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as started:
            for server in (self.primary, self.replica, *self.sentinels):
                started.enter_context(server)
            _until(lambda: self._watched(), "the Sentinels do not know each other and the replica")
            self._stack = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _watched(self) -> bool:
        states = [sentinel.client.sentinel_master(SERVICE) for sentinel in self.sentinels]
        return all(state["num-other-sentinels"] == SENTINELS - 1 and state["num-slaves"] == 1 for state in states)

    @property
    def client(self) -> Any:
        """A client of the current primary."""
        roles = {server: _role(server) for server in (self.replica, self.primary)}
        return next(server for server, role in roles.items() if role == b"master").client

    def cut_replication(self) -> None:
        """Stop the replication, so that the replica gets no further writes."""
        self.primary.client.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        self.primary.client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def wait_promoted(self) -> None:
        _until(lambda: _role(self.replica) == b"master", "the replica is not promoted")


def _role(server: StoreServer) -> bytes | None:
    try:
        role: bytes = server.client.execute_command("ROLE")[0]
        return role
    except redis.RedisError:
        return None


def _until(reached: Any, what: str) -> None:
    deadline = time.monotonic() + AGREEMENT_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
