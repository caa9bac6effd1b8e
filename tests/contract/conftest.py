# SPDX-License-Identifier: Apache-2.0
"""Real servers for the contract: the embedded Valkey, Debian's Redis, and a cluster of three.

Each is started once, and ended by pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import zmq

from kvrouter.router.base.redis_client.embedded_valkey import EmbeddedStore
from kvrouter.router.serve.api.http.http_api import HttpApi
from tests.contract.api_support import TinyCore, build, hit
from tests.support.client_callers import CALLERS, Caller
from tests.support.fake_engine import FakeEngine
from tests.support.ports import free_port
from tests.support.store_server import StoreCluster, StoreServer
from tests.support.tls_redis import TlsRedis, tls_redis

# The assertions of these modules are rewritten as a test's are, wherever the modules are imported from.
pytest.register_assert_rewrite(
    *(
        f"tests.contract.index_{name}"
        for name in ("support", "checkpoint_laws", "commit_laws", "lease_laws", "follow_laws")
    )
)

START_TIMEOUT_S = 20.0


@contextlib.contextmanager
def running(binary: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen([binary, "--dir", str(folder), "--save", "", *arguments], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {START_TIMEOUT_S:g} s")


def redis_binary() -> str:
    """Return the path of Debian's redis-server.

    Without it CI fails, and any other machine skips the tests that need it.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        reason = (
            "no redis-server on PATH, so the index contract did not run on Redis itself with a password and a db "
            "(embedded Valkey and the cluster did): apt-get install redis-server"
        )
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return binary


@pytest.fixture(scope="session")
def embedded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # One loop, because the store keeps a connection.
    with asyncio.Runner() as runner:
        store = runner.run(EmbeddedStore.start(tmp_path_factory.mktemp("embedded")))
        yield store.url
        runner.run(store.stop())


@pytest.fixture
def url(embedded_url: str) -> Iterator[str]:
    """Empty the store before and after the test, because other tests use it too."""
    client = redis.Redis.from_url(embedded_url)
    client.flushall()
    yield embedded_url
    client.flushall()
    client.close()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    with running(redis_binary(), folder, "--port", str(port), "--requirepass", "pa/ss"):
        client = redis.Redis(port=port, password="pa/ss")
        wait_for(client.ping, "redis-server")
        client.close()
        yield f"redis://:pa%2Fss@127.0.0.1:{port}/1"


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedis]:
    with tls_redis(tmp_path_factory.mktemp("tls"), "router-secret") as server:
        yield server


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with StoreCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield f"redis://127.0.0.1:{cluster.nodes[1].port}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with StoreServer(tmp_path / "store", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = FakeEngine(context)
    yield engine
    engine.close()
    context.destroy(linger=0)


@pytest.fixture(params=CALLERS, ids=lambda kind: kind.__name__)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Caller]]:
    """Create callers of one kind, and close them at the end."""
    callers: list[Caller] = []

    def new(url: str, **options: Any) -> Caller:
        callers.append(request.param(url, **options))
        return callers[-1]

    yield new
    for caller in callers:
        caller.close()


@pytest.fixture
def core() -> TinyCore:
    return TinyCore([hit("w0", 16, 32, 48)])


@pytest.fixture
def app(core: TinyCore) -> HttpApi:
    return build(core)[0]


@pytest.fixture(params=["embedded_url", "cluster_url"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of the embedded Valkey, and in another run that of a cluster."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def raw(store_url: str) -> Iterator[Any]:
    """Return an empty store for administration."""
    is_cluster = not store_url.startswith("unix")
    client: Any = redis.RedisCluster.from_url(store_url) if is_cluster else redis.Redis.from_url(store_url)
    client.flushall()
    yield client
    client.flushall()
    client.close()
