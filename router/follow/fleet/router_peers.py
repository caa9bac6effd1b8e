# SPDX-License-Identifier: Apache-2.0
"""This process among the router processes on one store.

The processes exchange heartbeats and claims through Redis, and each derives which workers it should follow.
`membership.py` judges the heartbeats, `assignment.py` computes the shares.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from kvrouter.router.base.common import ticks, version
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


# The pause between two assignments of workers to routers. An assignment covers all workers, in some ten milliseconds for
# a thousand, and all workers that come within a pause share one.
ASSIGNMENT_PAUSE_S = 0.25


class Claims(msgspec.Struct, frozen=True):
    """The workers that one router process sees in its sources, without the sources that cannot be read."""

    # Worker ids and ranks by the source's name.
    workers: dict[str, list[tuple[str, int]]] = {}


class RouterPeers:
    """The other router processes on the store, and this process's share of the workers."""

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
        """Begin without knowledge of other routers.

        Args:
            registry: The registered workers.
            store: Exchanges heartbeats and claims.
            held: The workers that this process follows.
            contact: Learns whether the store answers.
            metrics: Counts values that are no heartbeats or claims.
            clock: Returns the time in seconds, monotonic.
            token: Identifies this process among the routers.
            ttl_s: The life of a lease.
            settings: The settings of this router that must be the same at all routers.
        """
        self._registry = registry
        self._store = store
        self._held = held
        self._contact = contact
        self._metrics = metrics
        self._clock = clock
        self.token = token
        self.settings = settings
        self._membership = Membership(token, ttl_s=ttl_s)
        self._beats = 0
        # The count of the last heartbeat that the store confirmed.
        self._confirmed = 0
        # Whether no other router counts.
        self._is_alone = True
        # Counts the changes of everything on which `is_mine` depends.
        self._assignment = 0
        # Whether a heartbeat was written, so that others know this process and hand workers over to it.
        self.attends = False
        # The workers that this process should follow.
        self._mine: frozenset[WorkerKey] = frozenset()
        # When `_mine` was computed, and whether it is still valid.
        self._mine_s = -math.inf
        self._mine_holds = False
        # The workers that this process will not follow, with the reasons; None if they must be determined again.
        self._refuses: dict[str, str] | None = None
        registry.subscribe(members=self._on_members)

    def _on_members(self, worker: WorkerKey | None) -> None:
        self._refuses = None
        self._mine_holds = False
        self._assignment += 1

    @property
    def routers(self) -> int:
        """The number of router processes that count as alive, this one included."""
        return len(self._membership.routers)

    @property
    def heartbeats(self) -> dict[str, Heartbeat]:
        """The last heartbeat of each router that counts, by token."""
        return self._membership.heartbeats

    async def _living(self) -> frozenset[str]:
        """Return the tokens of all routers that may live, including one that only just started."""
        beating = {token.decode("ascii", "replace") for token in await self._store.peers.heartbeats()}
        return self._membership.routers | {token for token in beating if not self._membership.is_gone(token)}

    async def beat(self) -> None:
        """Write this router's heartbeat, and judge those of the others. Raises StoreError."""
        membership, ignored, requested_s = self._membership, self._membership.ignored, self._clock()
        heartbeat = self._heartbeat()
        fields = await self._store.peers.beat(self.token, encode_heartbeat(heartbeat))
        self._confirmed = heartbeat.count
        self._contact.answered()
        if membership.look(fields, requested_s, self._clock()):
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
        return Heartbeat(
            self._beats,
            VERSION,
            holds,
            self._own_refusals(),
            version.VERSION,
            dict(self.settings),
            self._confirmed,
        )

    def _own_refusals(self) -> dict[str, str]:
        if self._refuses is None:
            self._refuses = {keys.worker_tag(worker): reason for worker, reason in self._registry.left_out.items()}
            states = [follower.state for follower in self._registry.followers.values()]
            self._refuses |= {state.tag: refusal for state in states if (refusal := state.facts.refusal)}
        return self._refuses

    async def beat_always(self) -> None:
        """Call `beat` every INTERVAL_S, until cancelled."""
        while True:
            await ticks.sleep(INTERVAL_S)
            # Without the store no worker can be taken or handed over; `judge_followers` judges its absence.
            try:
                await self.beat()
            except StoreError as error:
                self._contact.failed(error)

    async def leave(self) -> None:
        """Remove this process's heartbeat, so that it no longer counts among the routers."""
        if self.attends:
            with contextlib.suppress(StoreError):
                await self._store.peers.drop_heartbeats([self.token])

    async def judge_followers(self) -> None:
        """Mark the workers whose followers are not heard, even while Redis does not answer, until cancelled."""
        while True:
            # The judgement is a method of its own, because a loop variable here would keep the last follower alive.
            self._judge_followers()
            await ticks.sleep(INTERVAL_S)

    def _judge_followers(self) -> None:
        now_s = self._clock()
        self._contact.judge(is_refused=bool(self._held.refused))
        silence = self._contact.silence
        if len(self._held.holdings) == len(self._registry.followers):
            # This process follows all workers, as a process without others does.
            return
        unheard = silence and f"{silence}: what the router that follows this worker learns is not known here"
        for follower in self._registry.followers.values():
            if follower.state.tag not in self._held.holdings:
                problem = self._membership.follower_problem(follower.state.tag, now_s, follower.state.peer.position)
                follower.state.on_follower_heard(unheard or problem)

    def is_mine(self, worker: WorkerKey) -> bool:
        """Return whether this process should follow the worker.

        With several routers, a new worker is assigned within ASSIGNMENT_PAUSE_S, and the answer is False until then.
        """
        if self._is_alone:
            follower = self._registry.followers.get(worker)
            return follower is not None and not follower.state.facts.refusal
        self._assign_if_due()
        return worker in self._mine

    def disowns(self, token: str, worker: WorkerKey, since_s: float) -> bool:
        """Return whether the router with a token is heard, and has not named the worker in a heartbeat since a time."""
        return self._membership.disowns(token, keys.worker_tag(worker), since_s, self._clock())

    @property
    def assignment(self) -> int:
        """A number that changes whenever an answer of `is_mine` may change."""
        if not self._is_alone:
            self._assign_if_due()
        return self._assignment

    def _assign_if_due(self) -> None:
        if self._mine_holds or self._clock() < self._mine_s + ASSIGNMENT_PAUSE_S:
            return
        refused: dict[WorkerKey, set[str]] = {}
        for worker in (*self._registry.followers, *self._registry.left_out):
            tag = keys.worker_tag(worker)
            refused[worker] = set(self._membership.refusals.get(tag, ()))
            if tag in self._own_refusals():
                refused[worker].add(self.token)
        assigned = assign_workers(refused, self._membership.routers, refused)
        self._mine = frozenset(worker for worker, router in assigned.items() if router == self.token)
        self._mine_s, self._mine_holds = self._clock(), True
        self._assignment += 1

    async def claim(self, claims: Claims) -> None:
        """Publish the workers that this router's sources see."""
        await self._store.peers.put_claim(self.token, msgspec.json.encode(claims))

    async def disclaim(self) -> None:
        """Remove this router's claims."""
        await self._store.peers.drop_claims([self.token])

    async def claimed(self, source: str, *, own: bool = False) -> frozenset[tuple[str, int]]:
        """Return the ids and ranks of the workers that living routers see in a source of this name.

        Args:
            source: The source's name.
            own: Whether to include the claims of this process.
        """
        living = await self._living()
        names: set[tuple[str, int]] = set()
        dead = []
        for token, raw in (await self._store.peers.claims()).items():
            if token not in living:
                dead.append(token)
            elif own or token != self.token:
                try:
                    names.update(msgspec.json.decode(raw, type=Claims).workers.get(source, ()))
                except (msgspec.MsgspecError, ValueError) as error:
                    self._metrics.unreadable_values["claims"].inc()
                    log.warning("claims of another router not readable", extra={"router": token, "error": str(error)})
        if dead:
            await self._store.peers.drop_claims(dead)
        return frozenset(names)
