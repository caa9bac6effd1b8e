# SPDX-License-Identifier: Apache-2.0
"""A router starts on any store.

The stores are one with keys of another type than routers write, one on a disk without room, and a private one that lost
its data.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.router.index.store import keys
from tests.support.clinic import Clinic
from tests.support.fake_engine import FakeEngine
from tests.support.fleet import until
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

MODEL = "m"
DISK_BYTES = 6 * 1024**2
# Keys of all routers and workers together; the keys of one worker are in test_redis_garbage.py.
COMMON_KEYS = (keys.SCHEMAS, keys.ADOPTED, keys.MODELS, keys.REGISTRATIONS, keys.ROUTERS, keys.CLAIMS, keys.LOADS)


def registered(router: RouterProcess) -> list[str]:
    return [row["worker_id"] for row in router.request("GET", "/workers")["workers"]]


@pytest.mark.parametrize("key", COMMON_KEYS)
def test_a_key_of_another_type_is_replaced_at_a_start(
    key: str, tmp_path: Path, server: StoreServer, engine: FakeEngine
) -> None:
    flags = ["--redis", server.url]
    with RouterProcess(tmp_path / "a", flags) as router:
        for number in range(2):
            router.request("POST", "/register", engine.registration(f"w{number}", f"{MODEL}{number}"))
    kind = server.client.type(key)
    server.client.delete(key)
    server.client.sadd(key, b"x") if kind == b"list" else server.client.rpush(key, b"x")
    with RouterProcess(tmp_path / "b", flags) as router:
        until(lambda: registered(router) == ["w0", "w1"], f"the workers are lost: {registered(router)}")
        until(lambda: server.client.type(key) != b"list", f"{key} is not replaced")
        # The next router also knows workers that are registered from now on.
        router.request("POST", "/register", engine.registration("w2", "m2"))
    with RouterProcess(tmp_path / "c", flags) as router:
        assert registered(router) == ["w0", "w1", "w2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for a store's first files and little more, which needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def told(router: RouterProcess) -> str:
    return str(router.request("GET", "/health")["reasons"])


@pytest.mark.parametrize("is_private", [True, False], ids=["private store", "shared store"])
def test_a_full_disk_is_named_and_ends_with_the_room(is_private: bool, tmp_path: Path, small_disk: Path) -> None:
    with contextlib.ExitStack() as stack:
        flags = ["--data-dir", str(small_disk)]
        if not is_private:
            flags = ["--redis", stack.enter_context(StoreServer(small_disk, "--appendonly", "yes")).url]
        router = stack.enter_context(RouterProcess(tmp_path / "a", flags))
        fill(small_disk)
        until(
            lambda: "No space left on device" in told(router) and "free space on its disk" in told(router), "the disk"
        )
        assert "has not answered" not in told(router)
        clinic = Clinic(router)
        assert "No space left on device" in clinic.find("KV501").evidence
        assert f"df -h {small_disk}" in clinic.find("KV503").fix
        (small_disk / "filler").unlink()
        until(lambda: "disk" not in told(router), "it is named although there is room")


def lose_manifest(data_dir: Path) -> None:
    (manifest,) = (data_dir / "appendonlydir").glob("*.manifest")
    manifest.unlink()


def flush(data_dir: Path) -> None:
    """Empty the store as a user might while no router runs."""
    latest = max((data_dir / "appendonlydir").glob("*.incr.aof"))
    with latest.open("ab") as file:
        file.write(b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*1\r\n$7\r\nFLUSHDB\r\n")


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("lose", [lose_manifest, flush])
def test_a_fleet_that_its_store_lost_is_not_well(
    lose: Callable[[Path], None], processes: str, tmp_path: Path, engine: FakeEngine
) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), "--processes", processes]
    with RouterProcess(tmp_path / "a", flags) as router:
        assert router.request("GET", "/health")["status"] == "ok", "none was ever registered"
        router.request("POST", "/register", engine.registration("w0", MODEL))
    with RouterProcess(tmp_path / "b", flags) as router:
        assert registered(router) == ["w0"] and "lost" not in told(router)
    # Every start notices the loss until somebody acts.
    for name in ("c", "d"):
        # Without a manifest Valkey goes on writing to the file that it did not read.
        lose(tmp_path / "data")
        with RouterProcess(tmp_path / name, flags) as router:
            assert registered(router) == [] and "its store lost them" in told(router)
            assert "register the workers again" in Clinic(router).find("KV508").fix
            assert router.metric("kvrouter_registrations_lost") >= 1
    with RouterProcess(tmp_path / "e", flags) as router:
        router.request("POST", "/register", engine.registration("w0", MODEL))
        until(lambda: "lost" not in told(router), "it is registered again")
        router.unregister("w0")
        until(lambda: registered(router) == [], "it is dropped")
    with RouterProcess(tmp_path / "f", flags) as router:
        assert router.request("GET", "/health")["status"] == "ok", "all were dropped"
