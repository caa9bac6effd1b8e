# SPDX-License-Identifier: Apache-2.0
"""The moments at which a worker's checkpoint is written.

A router that reads the store always finds the blocks that the engine holds. Store, sockets and streams are real.
"""

from __future__ import annotations

import itertools

import pytest

from kvrouter.router.app.core.router_core import Core
from kvrouter.router.follow.streams import commits
from kvrouter.router.index.store import checkpoint, keys
from tests.contract.lead_support import (
    CHAIN,
    SECOND,
    TOKENS,
    WORKER,
    following,
    held_in_store,
    is_well,
    reused,
    router,
    shows,
    until,
)
from tests.support.fake_engine import FakeEngine, removed, stored
from tests.support.store_server import StoreServer

META = keys.meta(WORKER)


def numbers(server: StoreServer) -> tuple[int, int]:
    """Return the number of the last entry in the checkpoint, and that of the last entry in the log."""
    fields = server.client.hmget(META, keys.META_CHECKPOINT, keys.META_COMMITS)
    return int(fields[0] or 0), int(fields[1] or 0)


def is_settled(server: StoreServer) -> bool:
    done, commits = numbers(server)
    return 0 < done == commits


def stored_bytes(server: StoreServer) -> int:
    epoch = (server.client.hget(META, keys.META_EPOCH) or b"").decode()
    return int(server.client.strlen(f"{keys.PREFIX}{keys.worker_tag(WORKER)}:{epoch}:g0:GPU"))


async def loaded(core: Core) -> set[int]:
    image = await core._store.load(WORKER)
    return {block for hashes in image.places.values() for block in hashes.tolist()}


async def test_a_worker_that_is_quiet_gets_its_checkpoint(
    server: StoreServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "QUIET_S", 0.05)
    async with following(server, engine) as core:
        await until(lambda: is_settled(server) and stored_bytes(server) == 8 * 12, "no checkpoint while quiet")
        engine.publish(*removed(CHAIN[5:]))
        await until(lambda: stored_bytes(server) == 8 * 5, "no second checkpoint")
        assert is_settled(server)
        assert held_in_store(server) == set(CHAIN[:5]) == await loaded(core)
        assert server.client.hget(META, keys.META_PLACES).startswith(b"g0:GPU=5=")
        assert not core.registry.followers[WORKER].commits.tail.blocks


async def test_without_quiet_a_long_tail_brings_a_checkpoint_and_a_short_one_does_not(
    server: StoreServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "TAIL_BLOCKS", 10 * checkpoint.ENTRY_BLOCKS)
    async with following(server, engine) as core:
        await until(lambda: held_in_store(server) == set(CHAIN), "not committed")
        done, commits = numbers(server)
        assert done < commits and stored_bytes(server) == 0
        # Each change becomes a separate commit, because the next one is published after it is stored.
        for turn in itertools.count():
            engine.publish(*(removed(CHAIN[6:]) if turn % 2 == 0 else [stored(TOKENS, 6, 12)]))
            blocks = 12 if turn % 2 else 6
            await until(lambda blocks=blocks: is_well(core, blocks), "not taken in")  # type: ignore[misc]
            expected = set(CHAIN[:blocks])
            await until(lambda e=expected: held_in_store(server) == e, "not committed")  # type: ignore[misc]
            assert await loaded(core) == expected
            if numbers(server)[0] > done:
                break
            assert turn < 20, "no checkpoint"
        assert turn > 3
        # The router that takes over continues from the checkpoint and the log behind it.
        engine.publish(*removed(CHAIN[3:]))
        await until(lambda: is_well(core, 3), "not taken in")
    async with router(server, SECOND) as other:
        await until(lambda: is_well(other, 3), "not taken over")
        assert held_in_store(server) == set(CHAIN[:3]) == await loaded(other)
        tail = other.registry.followers[WORKER].commits.tail

        def is_measured() -> bool:
            done, commits = numbers(server)
            return tail.entries == commits - done > 0

        await until(is_measured, "it does not know what lies behind the checkpoint")


@pytest.mark.parametrize("lost", ["log", "copies"])
async def test_a_store_that_lost_the_end_of_a_log_or_copies_is_written_again(
    lost: str, server: StoreServer, engine: FakeEngine
) -> None:
    async with following(server, engine) as core:
        await until(lambda: held_in_store(server) == set(CHAIN), "not committed")
        epoch = server.client.hget(META, keys.META_EPOCH)
        assert server.client.delete(keys.log(WORKER) if lost == "log" else keys.copies(WORKER, epoch.decode()))
        async with router(server, SECOND) as other:
            # The other router reports that it cannot load the worker; the router that follows the worker opens a
            # new epoch.
            await until(lambda: server.client.hget(META, keys.META_EPOCH) != epoch, "the epoch is not voided")
            await until(lambda: is_well(core, 12) and is_well(other, 12), "not well again")
            assert held_in_store(server) == set(CHAIN) == await loaded(other)


async def test_blocks_whose_numbers_of_copies_were_evicted_are_read_again(
    server: StoreServer, engine: FakeEngine
) -> None:
    async with following(server, engine) as core:
        await until(lambda: held_in_store(server) == set(CHAIN), "not committed")
        engine.publish(stored(TOKENS, 0, 12))
        epoch = server.client.hget(META, keys.META_EPOCH).decode()
        # Each block has two copies now, and the key also has its mark.
        await until(lambda: server.client.hlen(keys.copies(WORKER, epoch)) == 12 + 1, "no copies are written")
        assert is_well(core, 12)
    assert server.client.delete(keys.copies(WORKER, epoch))
    async with router(server, SECOND) as other:
        await until(lambda: is_well(other, 12), "not taken over")
        engine.publish(*removed(CHAIN))
        seq = engine.publish(*removed(CHAIN[6:]))
        await until(lambda: shows(other, seq), "the removals are not taken in")
        assert reused(other) == 6
