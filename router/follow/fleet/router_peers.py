# SPDX-License-Identifier: Apache-2.0
"""This process among the router processes on one store: the heartbeats and claims that they tell each other in Redis,
and which workers it should follow. What heartbeats mean is `membership.py`'s, the shares `assignment.py`'s."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from kvrouter.router.base.common import version
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.fleet.assignment import assign_workers
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.heartbeat import VERSION, Heartbeat, Hold, encode_heartbeat
from kvrouter.router.follow.fleet.membership import INTERVAL_S, Membership
from kvrouter.router.follow.fleet.store_contact import StoreContact
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.store import IndexStore

log = logging.getLogger("kvrouter.fleet")


# Pause between two assignments of workers to routers. An assignment covers all workers, in some ten milliseconds for a
# thousand, and all that come within a pause share one.
ASSIGNMENT_PAUSE_S = 0.25


class Claims(msgspec.Struct, frozen=True):
    """What one router process sees in its sources that are well: by the source's name, worker ids and ranks."""

    workers: dict[str, list[tuple[str, int]]] = {}


class RouterPeers:
    """`token` names this process among the routers; ttl_s: the life of a lease."""

    def __init__(
        self,
        registry: WorkerRegistry,
        *,
        store: IndexStore,
        held: HeldWorkers,
        contact: StoreContact,
        metrics: FleetMetrics,
        clock: Callable[[], float],
        token: str,
        ttl_s: float,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """settings: those of this router that must be the same at all."""
        self._registry = registry
        self._store = store
        self._held = held
        self._contact = contact
        self._metrics = metrics
        self._clock = clock
        self.token = token
        self._settings = dict(settings)
        self._membership = Membership(token, ttl_s=ttl_s)
        self._beats = 0
        # Whether there is no other.
        self._is_alone = True
        # Counts what `is_mine` depends on.
        self._assignment = 0
        # Whether others know of this process, and hand workers over to it.
        self.attends = False
        # The workers that this process should follow, as was found then, and whether that holds.
        self._mine: frozenset[WorkerKey] = frozenset()
        self._mine_s = -math.inf
        self._mine_holds = False
        # The workers that it will not follow, with the reasons; None when they have to be found again.
        self._refuses: dict[str, str] | None = None
        registry.subscribe(members=self._on_members)

    def _on_members(self, worker: WorkerKey | None) -> None:
        self._refuses = None
        self._mine_holds = False
        self._assignment += 1

    @property
    def routers(self) -> int:
        """Router processes that count as alive, this one included."""
        return len(self._membership.routers)

    @property
    def heartbeats(self) -> dict[str, Heartbeat]:
        """The last heartbeat of each router that counts, by token."""
        return self._membership.heartbeats

    async def _living(self) -> frozenset[str]:
        """Tokens of the routers that live, as far as is known; also of one that only just began."""
        beating = {token.decode("ascii", "replace") for token in await self._store.peers.heartbeats()}
        return self._membership.routers | {token for token in beating if not self._membership.is_gone(token)}

    async def beat(self) -> None:
        """Write this router's heartbeat, and judge those of the others. Raises StoreError."""
        membership, ignored, asked_s = self._membership, self._membership.ignored, self._clock()
        fields = await self._store.peers.beat(self.token, encode_heartbeat(self._heartbeat()))
        self._contact.answered()
        if membership.look(fields, asked_s, self._clock()):
            log.info("routers changed", extra={"routers": len(membership.routers), "refused": len(membership.refusals)})
            self._mine_holds, self._mine_s = False, -math.inf
            self._is_alone = membership.routers == {self.token}
            self._assignment += 1
        self._metrics.heartbeats_ignored.inc(membership.ignored - ignored)
        self.attends = True
        if forgotten := membership.forgotten:
            await self._store.peers.drop_heartbeats(forgotten)

    def _heartbeat(self) -> Heartbeat:
        self._beats += 1
        held, now_s = self._held, self._clock()
        holds = {
            tag: Hold(holding.lease, holding.commits, round(1_000 * held.waits_s(tag, now_s)))
            for tag, holding in held.holdings.items()
        }
        return Heartbeat(self._beats, VERSION, holds, self._own_refusals(), version.VERSION, self._settings)

    def _own_refusals(self) -> dict[str, str]:
        if self._refuses is None:
            self._refuses = {keys.worker_tag(worker): reason for worker, reason in self._registry.left_out.items()}
            streams = self._registry.streams.values()
            self._refuses |= {stream.tag: refusal for stream in streams if (refusal := stream.refusal)}
        return self._refuses

    async def beat_always(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            # Without the store nothing can be taken or handed over; its absence is judged below.
            try:
                await self.beat()
            except StoreError as error:
                self._contact.failed(error)

    async def leave(self) -> None:
        """Count among the routers no longer."""
        if self.attends:
            with contextlib.suppress(StoreError):
                await self._store.peers.drop_heartbeats([self.token])

    async def judge_followers(self) -> None:
        """Mark the workers whose followers are not heard, also while Redis answers nothing."""
        while True:
            # Not here, where the last stream would be held until the next one is looked at.
            self._judge_followers()
            await asyncio.sleep(INTERVAL_S)

    def _judge_followers(self) -> None:
        now_s = self._clock()
        self._contact.judge(is_refused=bool(self._held.refused))
        silence = self._contact.silence
        if len(self._held.holdings) == len(self._registry.streams):
            # All are followed here, as in a process that is alone.
            return
        unheard = silence and f"{silence}: what the router that follows this worker learns is not known here"
        for stream in self._registry.streams.values():
            if stream.tag not in self._held.holdings:
                heard = self._membership.follower_problem(stream.tag, now_s, stream.position)
                stream.follower_heard(unheard or heard)

    def is_mine(self, worker: WorkerKey) -> bool:
        """Whether this process should follow the worker; of one that is new among several routers, known in a
        moment."""
        if self._is_alone:
            stream = self._registry.streams.get(worker)
            return stream is not None and not stream.refusal
        self._assign_if_due()
        return worker in self._mine

    @property
    def assignment(self) -> int:
        """Changes before `is_mine` does."""
        if not self._is_alone:
            self._assign_if_due()
        return self._assignment

    def _assign_if_due(self) -> None:
        if self._mine_holds or self._clock() < self._mine_s + ASSIGNMENT_PAUSE_S:
            return
        refused: dict[WorkerKey, set[str]] = {}
        for one in (*self._registry.streams, *self._registry.left_out):
            tag = keys.worker_tag(one)
            refused[one] = set(self._membership.refusals.get(tag, ()))
            if tag in self._own_refusals():
                refused[one].add(self.token)
        found = assign_workers(refused, self._membership.routers, refused)
        self._mine = frozenset(worker for worker, router in found.items() if router == self.token)
        self._mine_s, self._mine_holds = self._clock(), True
        self._assignment += 1

    async def claim(self, claims: Claims) -> None:
        """Tell the other routers what the sources of this one see."""
        await self._store.peers.put_claim(self.token, msgspec.json.encode(claims))

    async def disclaim(self) -> None:
        await self._store.peers.drop_claims([self.token])

    async def claimed(self, source: str, *, own: bool = False) -> frozenset[tuple[str, int]]:
        """Ids and ranks that living routers see in a source of this name; own: this process's word counts too."""
        living = await self._living()
        found: set[tuple[str, int]] = set()
        dead = []
        for token, raw in (await self._store.peers.claims()).items():
            if token not in living:
                dead.append(token)
            elif own or token != self.token:
                try:
                    found.update(msgspec.json.decode(raw, type=Claims).workers.get(source, ()))
                except (msgspec.MsgspecError, ValueError) as error:
                    self._metrics.unreadable_values["claims"].inc()
                    log.warning("claims of another router not readable", extra={"router": token, "error": str(error)})
        if dead:
            await self._store.peers.drop_claims(dead)
        return frozenset(found)
