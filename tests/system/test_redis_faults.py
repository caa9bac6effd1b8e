# SPDX-License-Identifier: Apache-2.0
"""Faults of Redis under two routers.

The routers go on answering and name the fault, and the index is right when Redis is back.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.churn import Churn
from tests.support.fleet import check, rows, two_routers, until, wait_well
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreServer

ENGINES = 4
RATE = 5_000.0
# Longer than a lease (1.5 s), so that everything in Redis that expires does.
AWAY_S = 5.0

Pair = tuple[RouterProcess, RouterProcess]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with StoreServer(tmp_path / "store", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def pair(tmp_path: Path, server: StoreServer, churn: Churn) -> Iterator[Pair]:
    with two_routers(tmp_path, server, churn, ENGINES) as pair:
        yield pair


def said(router: RouterProcess, words: str) -> bool:
    """Return whether health names the trouble, and the reason of a worker does, too."""
    reasons = router.request("GET", "/health")["reasons"]
    return any(words in reason for reason in reasons) and any(words in row["reason"] for row in rows(router).values())


def answered(router: RouterProcess) -> None:
    """Check that questions are answered and credit is given."""
    answer = router.request("POST", "/query_by_hash", {"model": "m", "block_hashes": [1, 2, 3]})
    assert len(answer["instances"]) == ENGINES
    assert sum(sum(row["residency"].values()) for row in rows(router).values()) > 1_000


def recovered(pair: Pair, server: StoreServer, churn: Churn) -> None:
    for router in pair:
        wait_well(router, ENGINES)
    assert check(pair, server.client, churn) > 100


def rewrites(pair: Pair, churn: Churn) -> float:
    return sum(
        router.metric("kvrouter_index_rewrites_total", worker=worker) for router in pair for worker in churn.workers
    )


def store_down(router: RouterProcess) -> bool:
    return router.metric("kvrouter_store_up") == 0


def test_routers_recover_from_a_restart_of_redis_with_its_data(pair: Pair, server: StoreServer, churn: Churn) -> None:
    server.kill()
    for router in pair:
        until(partial(said, router, "Redis"), "the loss of Redis is not named")
        answered(router)
        until(partial(store_down, router), "the loss of Redis is not counted")
    time.sleep(AWAY_S)
    assert pair[0].metric("kvrouter_store_silent_seconds") > AWAY_S - 2
    server.start()
    recovered(pair, server, churn)


def test_routers_write_the_index_again_after_redis_lost_its_data(
    pair: Pair, server: StoreServer, churn: Churn, tmp_path: Path
) -> None:
    server.kill()
    shutil.rmtree(tmp_path / "store")
    time.sleep(AWAY_S)
    server.start()
    recovered(pair, server, churn)
    assert rewrites(pair, churn) >= ENGINES


@pytest.mark.parametrize("engines", ["busy", "silent"])
def test_routers_write_the_index_again_after_everything_was_deleted(
    engines: str, pair: Pair, server: StoreServer, churn: Churn
) -> None:
    if engines == "silent":
        churn.ask("pause")
    server.client.flushall()
    until(lambda: rewrites(pair, churn) >= ENGINES, "the index is not rewritten")
    recovered(pair, server, churn)
    assert sum(router.metric("kvrouter_registry_repairs_total") for router in pair) >= 1
    # The index was rewritten from memory: the engines were queried for nothing that they may have forgotten.
    assert all(row["gaps"] == 0 for row in rows(pair[0]).values())


@pytest.mark.parametrize("engines", ["busy", "silent"])
def test_a_replica_that_lacks_the_last_writes_takes_over(
    engines: str, pair: Pair, server: StoreServer, churn: Churn, tmp_path: Path
) -> None:
    with StoreServer(tmp_path / "replica", "--appendonly", "yes") as replica:
        replica.client.replicaof("127.0.0.1", server.port)
        until(lambda: replica.client.info("replication")["master_link_status"] == "up", "the replica does not follow")
        until(lambda: replica.client.dbsize() == server.client.dbsize() > 0, "the replica is not filled")
        # From here on the replica is cut off, so all later writes will be lost.
        replica.client.replicaof("NO", "ONE")
        time.sleep(0.7)
        if engines == "silent":
            churn.ask("pause")
            time.sleep(0.3)
        server.kill()
        replica.client.shutdown(save=True)
        replica.kill()
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "replica").rename(tmp_path / "store")
        server.start()
    recovered(pair, server, churn)


@pytest.mark.parametrize("away_s", [1.0, AWAY_S, 14.0])
def test_routers_answer_while_redis_stands_still(away_s: float, pair: Pair, server: StoreServer, churn: Churn) -> None:
    """Let Redis accept connections without answering.

    It stands still for less than a lease, for longer, and for longer than we wait for an answer.
    """
    server.stop()
    time.sleep(away_s)
    for router in pair:
        answered(router)
        assert away_s < 12 or said(router, "Redis")
    server.resume()
    recovered(pair, server, churn)


def test_routers_answer_while_redis_is_slow(pair: Pair, server: StoreServer, churn: Churn) -> None:
    def hold_up() -> None:
        for _ in range(4):
            server.client.execute_command("CLIENT", "PAUSE", 1_500, "ALL")
            time.sleep(2.0)

    slow = threading.Thread(target=hold_up)
    slow.start()
    while slow.is_alive():
        for router in pair:
            answered(router)
    slow.join()
    recovered(pair, server, churn)


def test_routers_name_a_redis_that_is_out_of_memory(pair: Pair, server: StoreServer, churn: Churn) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", "1mb")
    for router in pair:
        until(partial(said, router, "OOM"), "that Redis is full is not named")
        answered(router)
    time.sleep(AWAY_S)
    server.client.config_set("maxmemory", "0")
    recovered(pair, server, churn)
