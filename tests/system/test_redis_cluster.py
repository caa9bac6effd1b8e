# SPDX-License-Identifier: Apache-2.0
"""Two routers on a cluster of three: slots move under them, a node is lost and comes back, with or without its data."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvrouter.router.index.store import keys
from tests.support.churn import Churn
from tests.support.fleet import (
    MODEL,
    check,
    register,
    rows,
    two_empty_routers,
    until,
    wait_busy,
    wait_shared,
    wait_well,
)
from tests.support.router_process import RouterProcess
from tests.support.store_server import StoreCluster

ENGINES = 6
RATE = 3_000.0

Pair = tuple[RouterProcess, RouterProcess]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StoreCluster]:
    with StoreCluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def pair(tmp_path: Path, cluster: StoreCluster, churn: Churn) -> Iterator[Pair]:
    with two_empty_routers(tmp_path, cluster.url) as (one, two):
        register(one, churn)
        churn.ask("go")
        wait_shared((one, two), ENGINES)
        check((one, two), cluster.client, churn)
        churn.ask("go")
        wait_busy(cluster.client, churn)
        yield one, two
        for router in (one, two):
            assert "Traceback" not in router.log_tail()


def test_slots_that_move_are_followed(pair: Pair, cluster: StoreCluster, churn: Churn) -> None:
    for worker in churn.workers:
        cluster.move_slot(f"{keys.PREFIX}{{{MODEL}/{worker}}}:meta")
    cluster.move_slot(keys.ROUTERS)
    for router in pair:
        wait_well(router, ENGINES)
    assert check(pair, cluster.client, churn) > 100
    assert all(row["gaps"] == 0 for row in rows(pair[0]).values())


def health_reasons(router: RouterProcess) -> list[str]:
    return list(router.request("GET", "/health")["reasons"])


@pytest.mark.parametrize("data", ["kept", "lost"])
def test_routers_recover_when_a_lost_node_comes_back(
    data: str, pair: Pair, cluster: StoreCluster, churn: Churn, tmp_path: Path
) -> None:
    lost = cluster.nodes[1]
    lost.kill()
    for router in pair:
        until(partial(health_reasons, router), "the loss of a node is not named")
    time.sleep(5.0)
    for router in pair:
        assert sum(sum(row["residency"].values()) for row in rows(router).values()) > 1_000
    if data == "lost":
        # Only the data is lost: the node's place in the cluster is in nodes.conf.
        shutil.rmtree(tmp_path / "cluster" / "1" / "appendonlydir")
    lost.start()
    cluster.wait_well()
    for router in pair:
        wait_well(router, ENGINES)
    assert check(pair, cluster.client, churn) > 100
