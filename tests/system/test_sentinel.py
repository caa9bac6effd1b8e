# SPDX-License-Identifier: Apache-2.0
"""Two routers on a Redis that Sentinel watches: its primary fails, and the replica is promoted.

The replica has all that was committed, or lacks the last of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError, StoreUnavailable
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.store import IndexStore
from tests.support.churn import Churn
from tests.support.fleet import MODEL, check, rows, two_routers, until, wait_busy, wait_well
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess
from tests.support.sentinel_store import PASSWORD, SENTINEL_PASSWORD, SERVICE, SentinelStore

ENGINES = 4
RATE = 5_000.0

Pair = tuple[RouterProcess, RouterProcess]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SentinelStore]:
    with SentinelStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def pair(tmp_path: Path, store: SentinelStore, churn: Churn) -> Iterator[Pair]:
    with two_routers(tmp_path, store, churn, ENGINES) as pair:
        yield pair
    for name in "ab":
        log = (tmp_path / name / "router.log").read_text(errors="replace")
        assert PASSWORD not in log and SENTINEL_PASSWORD not in log


def seqs(client: Any, churn: Churn) -> list[int]:
    """Return the last committed seq of each worker."""
    return [int(client.hget(keys.meta(WorkerKey(MODEL, worker)), keys.META_SEQ)) for worker in churn.workers]


def rewrites(pair: Pair, churn: Churn) -> float:
    return sum(
        router.metric("kvrouter_index_rewrites_total", worker=worker) for router in pair for worker in churn.workers
    )


def recovered(pair: Pair, store: SentinelStore, churn: Churn) -> None:
    for router in pair:
        wait_well(router, ENGINES)
    assert check(pair, store.replica.client, churn) > 100
    # The engines were queried for nothing that they may have forgotten.
    assert all(row["gaps"] == 0 for row in rows(pair[0]).values())


@pytest.mark.parametrize("fault", ["killed", "standing still"])
def test_the_routers_continue_with_the_promoted_replica(
    fault: str, pair: Pair, store: SentinelStore, churn: Churn
) -> None:
    if fault == "killed":
        store.primary.kill()
    else:
        store.primary.stop()
    store.wait_promoted()
    recovered(pair, store, churn)
    # The old primary comes back believing that it is the primary, until a Sentinel says otherwise.
    churn.ask("go")
    if fault == "killed":
        store.primary.start()
    else:
        store.primary.resume()
    until(lambda: store.primary.client.info("replication")["role"] == "slave", "the old primary is not demoted")
    recovered(pair, store, churn)


@pytest.mark.parametrize("engines", ["busy", "silent"])
def test_a_promoted_replica_that_lacks_the_last_commits_gives_no_false_credit(
    engines: str, pair: Pair, store: SentinelStore, churn: Churn
) -> None:
    wait_busy(store.replica.client, churn)
    store.cut_replication()
    until(
        lambda: all(
            last > copied + 100
            for last, copied in zip(seqs(store.primary.client, churn), seqs(store.replica.client, churn), strict=True)
        ),
        "the replica is not behind",
    )
    if engines == "silent":
        churn.ask("pause")
    store.primary.kill()
    store.wait_promoted()
    # Silent engines publish nothing that could show the loss: the follower sees that Redis is behind its own writes.
    until(lambda: rewrites(pair, churn) >= ENGINES, "the index is not rewritten")
    recovered(pair, store, churn)


def test_the_error_of_a_wrong_sentinel_url_has_no_passwords(store: SentinelStore) -> None:
    async def refused(url: str) -> StoreError:
        with pytest.raises(StoreError) as raised:
            await IndexStore.open(url)
        assert "secret" not in repr(raised.value) and PASSWORD not in repr(raised.value)
        return raised.value

    async def main() -> None:
        hosts = store.url.partition("@")[2].partition("/")[0]
        unreachable = store.url.replace(hosts, f"127.0.0.1:{free_port()}")
        for url in (
            unreachable,
            store.url.replace(SERVICE, "other"),
            store.url.partition("?")[0],
            store.url.partition("=")[0] + "=secret",
        ):
            error = await refused(url)
            assert isinstance(error, StoreUnavailable)
            assert "Sentinel" in str(error) and "sentinel_password" in str(error)
        wrong = await refused(f"redis+sentinel://:secret@{store.url.partition('@')[2]}")
        assert "correct user and password" in str(wrong)
        # One Sentinel that answers is enough.
        mixed = store.url.replace(hosts, f"127.0.0.1:{free_port()},{hosts}")
        await (await IndexStore.open(mixed)).close()

    asyncio.run(main())


def test_a_replica_is_never_taken_for_the_primary(store: SentinelStore) -> None:
    """Refuse a server that a Sentinel still names as primary, although it follows another one now."""

    async def main() -> None:
        for sentinel in store.sentinels:
            sentinel.stop()
        store.primary.client.replicaof("127.0.0.1", store.replica.port)
        store.sentinels[0].resume()
        with pytest.raises(StoreUnavailable, match="no primary now"):
            await IndexStore.open(store.url)

    asyncio.run(main())
    for sentinel in store.sentinels:
        sentinel.resume()
