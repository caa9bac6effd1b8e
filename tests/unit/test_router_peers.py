# SPDX-License-Identifier: Apache-2.0
"""Reports of a router process to its peers, and the choice of its own workers."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from typing import Any, cast

import msgspec
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.heartbeat import VERSION, Heartbeat, Hold, decode_heartbeat, encode_heartbeat
from kvrouter.router.follow.fleet.membership import HEARD_S
from kvrouter.router.follow.fleet.router_peers import Claims, RouterPeers
from kvrouter.router.follow.fleet.store_contact import StoreContact
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.held_workers import HeldLease, HeldWorkers
from kvrouter.router.follow.streams.peer_view import META_STATE_LEASE, META_STATE_WRITER, PeerView
from kvrouter.router.follow.streams.stream_view import Position
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.workers.registration import Registration


class Store:
    """Store with the hashes of heartbeats and of claims."""

    def __init__(self) -> None:
        self.peers = self
        self.beats: dict[bytes, bytes] = {}
        self.claimed: dict[str, bytes] = {}

    async def beat(self, token: str, heartbeat: bytes) -> dict[bytes, bytes]:
        self.beats[token.encode()] = heartbeat
        return self.beats

    async def heartbeats(self) -> dict[bytes, bytes]:
        return self.beats

    async def drop_heartbeats(self, tokens: list[str]) -> None:
        for token in tokens:
            self.beats.pop(token.encode(), None)

    async def put_claim(self, token: str, raw: bytes) -> None:
        self.claimed[token] = raw

    async def claims(self) -> dict[str, bytes]:
        return self.claimed

    async def drop_claims(self, tokens: list[str]) -> None:
        for token in tokens:
            self.claimed.pop(token, None)


class Worker:
    """Follower, its state and facts in one, with the parts that peers use and change."""

    def __init__(self, worker_id: str, refusal: str | None = None) -> None:
        self.worker = WorkerKey("m", worker_id)
        self.registration = Registration(self.worker)
        self.tag = keys.worker_tag(self.worker)
        self.problem: str | None = "not judged"
        self._refusal = refusal
        self.asked = 0
        self.state = self.facts = self
        self.peer = PeerView(self.registration, None)
        self.peer.position = Position(1, 0)

    @property
    def refusal(self) -> str | None:
        self.asked += 1
        return self._refusal

    def on_follower_heard(self, problem: str | None) -> None:
        self.problem = problem


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.store = Store()
        self.registry = WorkerRegistry()
        self.held = HeldWorkers()
        self.count = 0
        metrics = FleetMetrics(MetricRegistry())
        self.peers = RouterPeers(
            self.registry,
            store=cast(IndexStore, self.store),
            held=self.held,
            contact=StoreContact(metrics=metrics, clock=lambda: self.now_s),
            metrics=metrics,
            clock=lambda: self.now_s,
            token="me",
            ttl_s=1.5,
        )

    def add(self, worker_id: str, refusal: str | None = None) -> Worker:
        worker = Worker(worker_id, refusal)
        self.registry.add(cast(Follower, worker))
        return worker

    def beat(self) -> Heartbeat:
        """Send this process's next heartbeat, and return it."""
        asyncio.run(self.peers.beat())
        decoded = decode_heartbeat(b"me", self.store.beats[b"me"])
        assert decoded is not None
        return decoded[1]

    def peer_beats(self, *holds: Worker) -> None:
        self.count += 1
        heartbeat = Heartbeat(self.count, VERSION, {worker.tag: Hold(1, 0) for worker in holds}, {})
        self.store.beats[b"you"] = encode_heartbeat(heartbeat)


@pytest.fixture
def world() -> World:
    return World()


def test_a_heartbeat_says_what_is_held_late_and_refused(world: World) -> None:
    first, second, _ = (world.add(name) for name in "abc")
    refused = world.add("d", "not allowed")
    world.held.holdings |= {first.tag: HeldLease(7, 70), second.tag: HeldLease(8, 80)}
    # The worker was late for a moment, has been late for long, and is no longer held, in this order.
    world.held.unwritten_since_s |= {first.tag: world.now_s, second.tag: world.now_s - 2.0, refused.tag: 0.0}
    world.registry.leave_out({WorkerKey("m", "e"): "no room"})
    heartbeat = world.beat()
    assert heartbeat.holds == {first.tag: Hold(7, 70), second.tag: Hold(8, 80, 2_000)}
    assert heartbeat.refuses == {refused.tag: "not allowed", keys.worker_tag(WorkerKey("m", "e")): "no room"}
    assert world.beat().count == heartbeat.count + 1


def test_refusals_are_looked_for_only_when_registrations_change(world: World) -> None:
    worker = world.add("a")
    world.beat()
    asked_before = worker.asked
    world.beat()
    assert worker.asked == asked_before
    world.add("b", "not allowed")
    assert len(world.beat().refuses) == 1


def test_workers_are_shared_with_a_peer_that_is_seen_to_beat(world: World) -> None:
    workers = [world.add(str(number)).worker for number in range(8)]
    world.beat()
    assert all(map(world.peers.is_mine, workers))
    assert not world.peers.is_mine(world.add("refused", "not allowed").worker)
    for _ in range(2):
        world.peer_beats()
        world.beat()
    assert world.peers.routers == 2
    assert sum(map(world.peers.is_mine, workers)) == len(workers) / 2


def test_no_worker_changes_hands_under_one_assignment(world: World) -> None:
    rng = random.Random(7)
    by_assignment: dict[int, dict[WorkerKey, bool]] = {}
    names = [str(number) for number in range(6)]
    several = 0
    for _ in range(400):
        world.now_s += rng.choice((0.01, 0.3))
        name = rng.choice(names)
        follower = world.registry.followers.get(WorkerKey("m", name))
        if follower is None:
            world.add(name, rng.choice((None, None, "not allowed")))
        elif rng.random() < 0.3:
            world.registry.remove(follower.worker)
        elif rng.random() < 0.5:
            if rng.random() < 0.6:
                world.peer_beats()
            else:
                world.store.beats.pop(b"you", None)
            world.beat()
        own_workers = {WorkerKey("m", name): world.peers.is_mine(WorkerKey("m", name)) for name in names}
        assert by_assignment.setdefault(world.peers.assignment, own_workers) == own_workers
        several += world.peers.routers > 1 and 0 < sum(own_workers.values()) < len(world.registry.followers)
    assert len(by_assignment) > 50 and several > 50


def test_a_worker_whose_follower_is_not_heard_says_why(world: World) -> None:
    async def judge() -> None:
        judging = asyncio.ensure_future(world.peers.judge_followers())
        await asyncio.sleep(0)
        judging.cancel()

    worker = world.add("a")
    for _ in range(3):
        world.peer_beats(worker)
        world.beat()
    asyncio.run(judge())
    assert worker.problem is None
    world.now_s += 2 * HEARD_S
    asyncio.run(judge())
    assert (worker.problem or "").startswith("Redis has not answered for 3 s: what the router that follows")
    world.beat()
    asyncio.run(judge())
    assert worker.problem == "router you, which follows this worker, has not been heard for 3 s"


async def test_a_removed_stream_is_let_go_while_followers_are_judged(world: World) -> None:
    judging = asyncio.ensure_future(world.peers.judge_followers())
    stream_ref = weakref.ref(world.add("a"))
    await asyncio.sleep(0)
    world.registry.remove(WorkerKey("m", "a"))
    gc.collect()
    assert stream_ref() is None
    judging.cancel()


def test_claims_of_living_peers_count_and_those_of_the_dead_are_dropped(world: World) -> None:
    async def claimed(**own: Any) -> frozenset[tuple[str, int]]:
        return await world.peers.claimed("file", **own)

    world.beat()
    world.peer_beats()
    asyncio.run(world.peers.claim(Claims({"file": [("mine", 0)]})))
    world.store.claimed["you"] = msgspec.json.encode(Claims({"file": [("yours", 1)], "other": [("x", 0)]}))
    world.store.claimed["dead"] = msgspec.json.encode(Claims({"file": [("gone", 0)]}))
    assert asyncio.run(claimed()) == {("yours", 1)}
    assert world.store.claimed.keys() == {"me", "you"}
    assert asyncio.run(claimed(own=True)) == {("yours", 1), ("mine", 0)}
    world.store.claimed["you"] = b"garbage"
    assert asyncio.run(claimed()) == frozenset()


def test_the_writer_of_a_state_counts_only_with_the_lease_under_which_it_wrote() -> None:
    worker = WorkerKey("m", "a")
    view = PeerView(Registration(worker), None)
    seen: list[Position] = []
    metas: tuple[dict[str, bytes], ...] = (
        {META_STATE_LEASE: b"7", META_STATE_WRITER: b"you:7"},
        {},
        # A router of an older version does not name itself.
        {META_STATE_LEASE: b"8"},
        {META_STATE_LEASE: b"9", META_STATE_WRITER: b"no lease"},
    )
    for commit, meta in enumerate(metas, 1):
        view.take_entry(LogEntry(worker, f"{commit}-0", commit, "e", None, None, False, [], meta), float(commit))
        seen.append(view.position)
    assert seen == [Position(7, 1, 1.0, "you"), Position(7, 2, 1.0, "you"), Position(8, 3, 3.0), Position(9, 4, 4.0)]
