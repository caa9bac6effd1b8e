# SPDX-License-Identifier: Apache-2.0
"""The operator of a fleet: registers, drains, moves and removes workers, until some router has acknowledged it.

Where routers have lists of workers, the operator changes the lists in place of registrations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import FILE
from tests.simulation.engine import Engine
from tests.simulation.router import Router

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

RETRY_S = 0.5
# How long an operator waits for an answer.
ANSWER_S = 5.0
# How often an operator looks whether some router knows a worker: a store that lost everything while no router ran lost
# the registrations for good.
LOOK_S = 5.0
# How far apart in time the lists of two routers are changed.
LISTS_APART_S = 3.0


class Wish:
    """The state that the operator wants for one worker."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Whether it is to be registered, at its second addresses, without new requests.
        self.is_wanted = False
        self.is_moved = False
        self.is_draining = False
        # The number of the last change, and of the last one that a router acknowledged.
        self.number = 0
        self.acknowledged = 0
        # How many of them ended what routers had of the worker.
        self.endings = 0

    @property
    def registration(self) -> Registration:
        """The wanted registration."""
        return self.engine.registration(is_moved=self.is_moved, is_draining=self.is_draining)


def _drained(is_draining: bool, newest: Registration | None) -> Registration | None:
    """Return the registration with another state, or None without one."""
    return newest and msgspec.structs.replace(newest, draining=is_draining)


class Operator:
    """The operator of one world."""

    def __init__(
        self,
        loop: VirtualLoop,
        routers: Sequence[Router],
        engines: Sequence[Engine],
        rng: random.Random,
        note: Callable[[str, str], None],
        *,
        has_lists: bool,
    ) -> None:
        """Begin without workers.

        Args:
            loop: The loop of the world.
            routers: The routers; those whose `listed` is not None have lists.
            engines: The engines.
            rng: Chooses routers.
            note: Adds a line to the history.
            has_lists: Whether workers are listed; otherwise they are registered.
        """
        self._loop, self._routers, self._rng, self._note = loop, routers, rng, note
        self._has_lists = has_lists
        self.wishes = {engine.worker: Wish(engine) for engine in engines}

    def want(
        self,
        worker: WorkerKey,
        *,
        is_wanted: bool | None = None,
        is_moved: bool | None = None,
        is_draining: bool | None = None,
    ) -> None:
        """Change what is wanted for a worker, where it is not None, and see to it."""
        wish = self.wishes[worker]
        before = wish.is_wanted, wish.is_moved
        wish.is_wanted = wish.is_wanted if is_wanted is None else is_wanted
        wish.is_moved = wish.is_moved if is_moved is None else is_moved
        wish.is_draining = wish.is_draining if is_draining is None else is_draining
        wish.number += 1
        wish.endings += before != (wish.is_wanted, wish.is_moved)
        if self._has_lists:
            self._change_lists()
        if not self._has_lists or is_draining is not None:
            self._tell(wish, wish.number)

    # -- lists

    def candidates(self) -> list[Candidate]:
        """Return the list that the routers' files have to show."""
        return [
            Candidate(msgspec.structs.replace(wish.registration, source=FILE, draining=False))
            for wish in self.wishes.values()
            if wish.is_wanted
        ]

    def _change_lists(self) -> None:
        for router in self._routers:
            if router.listed is not None:
                self._loop.after(self._rng.uniform(0.0, LISTS_APART_S), partial(self._change_list, router))

    def _change_list(self, router: Router) -> None:
        router.show(self.candidates())

    # -- requests

    def _tell(self, wish: Wish, number: int) -> None:
        """Send what is wanted to some router, again until one acknowledges it or something else is wanted."""
        if wish.number != number or wish.acknowledged == number:
            return
        router = self._rng.choice(self._routers)
        core, process = router.core, router.process
        if core is None or process is None:
            self._loop.after(RETRY_S, lambda: self._tell(wish, number))
            return
        is_answered = False

        async def send() -> None:
            nonlocal is_answered
            worker = wish.engine.worker
            try:
                if self._has_lists:
                    changed = await core.change(worker, partial(_drained, wish.is_draining))
                    if wish.is_wanted and changed is None:
                        # The list was not read yet.
                        self._loop.after(RETRY_S, lambda: self._tell(wish, number))
                        is_answered = True
                        return
                elif wish.is_wanted:
                    await core.register(wish.registration)
                else:
                    await core.unregister(worker.worker_id, worker.dp_rank)
            except (StoreError, RouterError) as error:
                self._note(router.name, f"does not change {wish.engine.name}: {error}")
                self._loop.after(RETRY_S, lambda: self._tell(wish, number))
            else:
                self._note(router.name, f"acknowledges change {number} of {wish.engine.name}")
                if number < wish.acknowledged:
                    # A request that hung came after a later one, which is sent again.
                    wish.acknowledged = 0
                    self._tell(wish, wish.number)
                else:
                    wish.acknowledged = number
            is_answered = True

        def wait() -> None:
            if not is_answered:
                self._tell(wish, number)

        process.start(send(), "operator")
        self._loop.after(ANSWER_S, wait)

    def look_always(self) -> None:
        """Register workers again that no router knows."""
        for worker, wish in self.wishes.items():
            known = any(
                router.core is not None and worker in router.core.registry.followers for router in self._routers
            )
            if wish.is_wanted and not known and wish.acknowledged == wish.number and not self._has_lists:
                wish.number += 1
                wish.endings += 1
                self._tell(wish, wish.number)
        self._loop.after(LOOK_S, self.look_always)

    def quieten(self) -> None:
        """Want all workers as they were meant to be, because faults may have undone changes."""
        for worker in self.wishes:
            self.want(worker, is_wanted=True, is_draining=False)

    def unfinished(self) -> str:
        """Return what differs from the wishes, or ""."""
        for worker, wish in self.wishes.items():
            for router in self._routers:
                core = router.core
                follower = None if core is None else core.registry.followers.get(worker)
                if follower is None and wish.is_wanted:
                    return f"registrations: {router.name} does not know {wish.engine.name}"
                if follower is None:
                    continue
                if not wish.is_wanted:
                    return f"registrations: {router.name} knows {wish.engine.name}, which was removed"
                shown, wanted = follower.state.registration, wish.registration
                if (shown.events, shown.url, shown.draining) != (wanted.events, wanted.url, wanted.draining):
                    return f"registrations: {router.name} has {shown}, not {wanted}"
        return ""
