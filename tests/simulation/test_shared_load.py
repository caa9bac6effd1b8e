# SPDX-License-Identifier: Apache-2.0
"""The law that nothing is counted for a router that left holds from the moment at which its word was read."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from kvrouter.router.index.store import keys
from kvrouter.router.route.load.load_messages import LoadMessage, encode
from kvrouter.router.route.load.load_sync import LoadSync
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.worker_load import LoadModel
from tests.simulation.shared_load import SharedLoad
from tests.simulation.written import LOADS, Written


class World:
    """A router `a` that reads what a process `q` publishes, and the law."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.share = LoadSync(
            LoadModel(LoadTable(), 10_000),
            cast(Any, None),
            process="p",
            clock=lambda: self.now_s,
            rng=random.Random(1),
            end_here=lambda selection_id, how: False,
            changed=lambda: None,
        )
        self.share._reading_since_s = self.now_s
        router = cast(Any, SimpleNamespace(name="a", answers=True, placer=SimpleNamespace(_share=self.share)))
        store = cast(Any, SimpleNamespace(store=SimpleNamespace(observe=self._observe, node=None, has_former=False)))
        self._law = SharedLoad([router], Written(store, [], [], self._now, self._fail), self._now)
        self._entries: list[tuple[bytes, list[bytes]]] = []

    def _observe(self, observer: Any) -> None:
        self._take = observer

    def _now(self) -> float:
        return self.now_s

    def _fail(self, problem: str) -> None:
        raise AssertionError(problem)

    def write(self, *, process: str = "q", leaves: bool = False) -> None:
        """Let the store execute a message of a process."""
        self.now_s += 0.001
        entry_id = b"%d-0" % round(1_000 * self.now_s)
        fields = [keys.LOADS_MESSAGE.encode(), encode(LoadMessage(process, True, leaves=leaves))]
        self._entries.append((entry_id, fields))
        self._take("b", [(b"XADD", LOADS, b"MAXLEN", b"~", b"4096", entry_id, *fields)])

    def evict(self) -> None:
        """Let the store drop all messages, as one without memory does."""
        self._entries.clear()
        self._take("", [(b"DEL", LOADS)])

    async def read(self, count: int) -> None:
        """Let the router read the first entries of those that are left."""
        self.now_s += 0.001
        read, self._entries = self._entries[:count], self._entries[count:]

        class Reader:
            async def run(self, request: bytes, replies: int, timeout_s: float) -> list[Any]:
                return [[(LOADS, read)]]

        await self.share._next(cast(Any, Reader()))

    @property
    def problem(self) -> str:
        """The problem that the law finds."""
        return self._law.problem()


async def test_reply_from_before_the_last_message_says_nothing_of_it() -> None:
    world = World()
    world.write()
    world.write(leaves=True)
    # The store sent this reply before the second message, and it arrives after it.
    await world.read(1)
    assert world.share._table.processes == {"q"} and not world.problem
    await world.read(1)
    assert not world.share._table.processes and not world.problem


async def test_process_whose_last_message_was_read_must_not_count() -> None:
    world = World()
    world.write()
    world.write(leaves=True)
    await world.read(2)
    world.share._table.heard("q", {}, whole=True, now=world.now_s)
    assert world.problem == "load: a still counts q, which has left"
    # A message from before the router began to read, again, was perhaps not read.
    world.share._reading_since_s = world.now_s
    assert not world.problem


async def test_last_message_that_the_store_evicted_was_perhaps_not_read() -> None:
    world = World()
    world.write()
    await world.read(1)
    world.write(leaves=True)
    world.evict()
    world.write(process="r")
    await world.read(1)
    assert world.share._table.processes == {"q", "r"} and not world.problem


async def test_message_that_was_under_way_counts_until_the_process_is_silent() -> None:
    world = World()
    world.write(leaves=True)
    world.write()
    await world.read(2)
    assert world.share._table.processes == {"q"} and not world.problem
