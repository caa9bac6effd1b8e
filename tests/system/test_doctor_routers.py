# SPDX-License-Identifier: Apache-2.0
"""Every fault of Redis and of the routers on it that `kvrouter doctor` knows, made and found.

Three routers share one Valkey: one that is well, one whose process and settings are odd, and one that needs a key and
has few rights.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrouter.events.vllm.wire import WireStored
from kvrouter.router.base.common.compiled import UNCOMPILED
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.index.store import keys
from tests.support.clinic import Clinic
from tests.support.fake_engine import FakeEngine, prompt, stored
from tests.support.fleet import until
from tests.support.ports import free_port
from tests.support.router_process import COMMAND_VARIABLE, RouterProcess
from tests.support.store_server import StoreServer

KEY = "open-sesame"
SMALL_BUDGET = 16 * 1024**2
# More blocks than fit into SMALL_BUDGET.
BATCHES, BATCH_BLOCKS = 24, 50_000
# A router with a clock a minute ahead, another version, and a task that fails again and again.
ODD_PROCESS = """\
import time
now_s = time.time
time.time = lambda: now_s() + 60.0
from kvrouter.router.base.common import version
version.VERSION = "9.9"
from kvrouter.router.app.core.router_core import Core
def fail(core):
    raise RuntimeError("a defect")
Core._tend_now = fail
from kvrouter.router.app.cli.commands import main
main()
"""
# The rights of a router's user, as in docs/how-to/hardening.md.
RIGHTS = (
    "resetkeys ~kvr:* resetchannels -@all +info +cluster|slots +select +multi +exec +watch +unwatch +get +set +del +unlink "
    "+pttl +hset +hsetnx +hget +hmget +hgetall +hdel +hlen +sadd +srem +smembers +xadd +xread +xrevrange +incr +incrby"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with StoreServer(tmp_path_factory.mktemp("store"), "--appendonly", "yes") as server:
        yield server


@pytest.fixture(scope="module")
def well(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    flags = ["--redis", store.url, "--mirror-budget-bytes", str(SMALL_BUDGET)]
    with RouterProcess(tmp_path_factory.mktemp("well"), flags) as router:
        yield Clinic(router)


@pytest.fixture(scope="module")
def workers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workers") / "workers.yaml"
    path.write_text("[]\n")
    return path


@pytest.fixture(scope="module")
def odd(
    store: StoreServer, well: Clinic, workers_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clinic]:
    flags = ["--redis", store.url, "--host", "0.0.0.0", "--policy", "random", "--allow-host", "127.0.0.1"]
    flags += ["--worker", f"waiting=http://127.0.0.1:{free_port()}", "--workers-file", str(workers_file)]
    flags += ["--max-workers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COMMAND_VARIABLE, shlex.join([sys.executable, "-c", ODD_PROCESS, "serve"]))
        router = RouterProcess(tmp_path_factory.mktemp("odd"), flags, {UNCOMPILED: "1"})
        with router:
            yield Clinic(router)


@pytest.fixture(scope="module")
def keyed(store: StoreServer, well: Clinic, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    store.client.execute_command("ACL", "SETUSER", "router", "on", ">secret", *RIGHTS.split())
    flags = ["--redis", f"redis://router:secret@127.0.0.1:{store.port}/0", "--api-key", KEY]
    with RouterProcess(tmp_path_factory.mktemp("keyed"), flags) as router:
        yield Clinic(router, KEY)


def test_a_router_with_a_redis_of_its_own_choice_is_well(well: Clinic, engine: FakeEngine) -> None:
    with well.worker(**engine.registration("w0", "m")):
        well.router.wait_connected("w0", engine.wait_subscribed)
        well.router.wait_seen("w0", engine.publish(stored(prompt(1), 0, 12)))
        report = well.wait_well()
        assert (report.ok, report.workers, report.routers) == (True, 1, 1)


def test_kv308_names_more_blocks_than_memory(well: Clinic, engine: FakeEngine) -> None:
    rng = np.random.default_rng(1)
    with well.worker(**engine.registration("large", "m")) as subject:
        well.router.wait_connected("large", engine.wait_subscribed)
        for _ in range(BATCHES):
            chain = [int(block_hash) for block_hash in rng.integers(2**33, 2**63, BATCH_BLOCKS)]
            engine.publish(WireStored(chain, 7, [], 16, None, "GPU", None, None, 0, "full_attention"))
        finding = well.find("KV308", subject)
        assert f"({SMALL_BUDGET})" in finding.evidence and "--mirror-budget-bytes" in finding.fix


def test_kv501_and_kv604_name_a_redis_that_stands_still(well: Clinic, keyed: Clinic, store: StoreServer) -> None:
    store.stop()
    try:
        assert "has not answered" in well.find("KV501", "Redis").evidence
    finally:
        store.resume()
    # Forbid one of the routers to read the load that they share.
    until(lambda: keyed.report().routers > 1, "the routers see each other")
    store.client.execute_command("ACL", "SETUSER", "default", "-xread")
    try:
        assert "NOPERM" in well.find("KV604", "router").evidence
    finally:
        store.client.execute_command("ACL", "SETUSER", "default", "+xread")
    # A router replaces another program's value at the key of the shared load.
    store.client.delete(keys.LOADS)
    store.client.set(keys.LOADS, "mine")
    until(lambda: store.client.type(keys.LOADS) == b"stream", "the load is shared again")
    until(lambda: not {"KV501", "KV604"} & set(well.codes()), "Redis is well again")


@pytest.mark.parametrize(
    ("code", "setting", "evidence"),
    [
        ("KV502", {"maxmemory-policy": "allkeys-lru"}, "allkeys-lru"),
        ("KV503", {"appendonly": "no"}, "neither appends"),
        ("KV504", {"maxmemory": ""}, "its maxmemory"),
    ],
)
def test_kv502_to_kv504_name_settings_of_redis(
    well: Clinic, store: StoreServer, code: str, setting: dict[str, Any], evidence: str
) -> None:
    client = store.client
    before = {name: client.config_get(name)[name] for name in setting}
    for name, value in setting.items():
        client.config_set(name, value or int(client.info("memory")["used_memory"] * 1.05))
    try:
        finding = well.find(code, f"Redis at 127.0.0.1:{store.port}")
        assert evidence in finding.evidence
        assert finding.fix.startswith(f"redis-cli -h 127.0.0.1 -p {store.port} CONFIG SET {next(iter(setting))} ")
    finally:
        for name, value in before.items():
            client.config_set(name, value)
    until(lambda: code not in well.codes(), "it is well again")


def test_kv506_names_a_registration_that_no_router_wrote(well: Clinic, store: StoreServer) -> None:
    store.client.sadd(keys.MODELS, "m")
    store.client.hset(keys.registry("m"), "w@x", b"\xff")
    store.client.incr(keys.REGISTRATIONS)
    try:
        assert keys.registry("m") in well.find("KV506", "Redis").evidence
    finally:
        store.client.hdel(keys.registry("m"), "w@x")
        store.client.incr(keys.REGISTRATIONS)
    until(lambda: "KV506" not in well.codes(), "it is well again")


def test_kv002_and_kv505_name_a_router_with_a_key_and_few_rights(keyed: Clinic) -> None:
    assert Clinic(keyed.router).codes() == Clinic(keyed.router, "wrong").codes() == ["KV002"]
    finding = keyed.find("KV505", "Redis")
    assert "TIME" in finding.evidence and "CONFIG" not in finding.evidence
    setting = keyed.find("KV602", "setting api_key").evidence
    assert setting.startswith("this router has set; router ") and setting.endswith(" has none")
    # KV505 is a note and no fault; that the routers differ (KV602) is a fault.
    assert {finding.severity.value for finding in keyed.report().findings if finding.code == "KV505"} == {"note"}


def test_kv003_kv004_kv601_and_kv603_name_another_version_and_another_time(odd: Clinic, well: Clinic) -> None:
    assert f"this command has version {VERSION}, the router 9.9" in odd.find("KV003").evidence
    assert "behind the router's" in odd.find("KV004").evidence
    assert "behind this router's" in odd.find("KV603").evidence
    for clinic in (odd, well):
        evidence = clinic.find("KV601", "routers").evidence
        assert "has 9.9" in evidence and f"has {VERSION}" in evidence


def test_kv006_kv007_and_kv008_name_a_process_at_risk(odd: Clinic) -> None:
    assert "0.0.0.0 without an API key" in odd.find("KV006", "router").evidence
    assert "are not compiled" in odd.find("KV007", "router").evidence
    assert "a defect" in odd.find("KV008", "router").evidence


def test_kv103_names_an_address_that_one_router_may_not_use(odd: Clinic, well: Clinic) -> None:
    with well.worker("elsewhere", url=f"http://localhost:{free_port()}") as subject:
        assert "localhost is not in the router's setting allow_hosts" in odd.find("KV103", subject).evidence
        assert "KV103" not in well.codes()


def test_kv108_names_more_workers_than_one_router_follows(odd: Clinic, well: Clinic, engine: FakeEngine) -> None:
    with well.worker(**engine.registration("first", "m")), well.worker("second", url=f"http://127.0.0.1:{free_port()}"):
        assert "raise max_workers" in odd.find("KV108", "worker ").evidence


def test_kv606_names_sources_that_contradict_each_other(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text("- {worker_id: listed, url: 'http://127.0.0.1:2', model: m}\n")
    flags = ["--worker", "listed=http://127.0.0.1:1,model=m,events=tcp://127.0.0.1:1", "--workers-file", str(path)]
    with RouterProcess(tmp_path / "router", flags) as router:
        evidence = Clinic(router).find("KV606", "worker listed (rank 0) of file").evidence
        assert evidence == "static registers it, too, and takes precedence"


def test_kv104_and_kv605_name_what_sources_list(odd: Clinic, workers_file: Path) -> None:
    assert "its model is not known" in odd.find("KV104", "worker waiting (rank 0) of static").evidence
    workers_file.write_text("[")
    assert "is down" in odd.find("KV605", "source file").evidence


def test_kv602_names_a_setting_that_differs(odd: Clinic, well: Clinic) -> None:
    evidence = well.find("KV602", "setting policy").evidence
    assert evidence.startswith("this router") and " has kv; router " in evidence and evidence.endswith(" has random")
    assert odd.find("KV602", "setting policy").evidence.startswith("this router has random")
