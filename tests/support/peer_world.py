# SPDX-License-Identifier: Apache-2.0
"""Engines with peer tiers in one process: real tiers, links and lenders, while the test decides about messages, copies and time."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.peer.chunk_checksum import ChunkChecksum
from kvrouter.engine_patch.offload.peer.data_plane import Copy, PlaneError
from kvrouter.engine_patch.offload.peer.lender import Lender, PeerFacts
from kvrouter.engine_patch.offload.peer.peer_link import Memory, Outcome, PeerLink, PullJob, Question
from kvrouter.engine_patch.offload.peer.peer_source import PeerSource, SourceWish
from kvrouter.engine_patch.offload.peer.peer_wire import (
    Borrow,
    Lent,
    ToReader,
    ToSource,
    Welcome,
    encode,
    read_by_reader,
    read_by_source,
)
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier
from kvrouter.engine_patch.offload.tiers.guests import Guests
from kvrouter.engine_patch.offload.tiers.lru import LruPolicy
from kvrouter.engine_patch.offload.tiers.peer_tier import PeerTier
from kvrouter.engine_patch.offload.tiers.tiering import LookupAnswer, Medium, PromotionRequest, Tiering
from kvrouter.engine_patch.offload.tiers.warming import Warming
from kvrouter.events.peer.hand_over import HandOverRequest, Warm
from tests.support.queued_disk import DiskJob, QueuedDisk

CHUNK_BYTES = 64
TIMEOUT_S = 1.0
IDENTITY = b"one model"


def key(number: int, group_idx: int = 0) -> OffloadKey:
    return pack(number.to_bytes(32, "big"), group_idx)


def content(key: OffloadKey, weights: int) -> bytes:
    """Return what an engine with these weights computes for a chunk."""
    return hashlib.sha512(key + weights.to_bytes(4, "big")).digest()


@dataclass(eq=False)
class Transfer:
    """A copy under way, from the memory as it is when the transfer ends."""

    name: str
    copies: list[Copy]
    hangs: bool = False
    damages: bool = False
    fails: bool = False
    done: bool = False


class CopyPlane:
    """A data plane within the process, whose transfers end when they are polled, unless the test holds them."""

    def __init__(self, metadata: bytes) -> None:
        self.metadata = metadata
        self.peers: set[str] = set()
        self.under_way: list[Transfer] = []
        # The faults of the next transfers.
        self.hangs = self.damages = self.fails = self.refuses = False

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode()
        assert name not in self.peers, "an engine was added twice"
        self.peers.add(name)
        return name

    def remove_peer(self, name: str) -> None:
        assert all(transfer.name != name for transfer in self.under_way), (
            "an engine was removed although its bytes may still arrive"
        )
        self.peers.discard(name)

    def read(self, name: str, copies: Sequence[Copy]) -> Transfer:
        if self.refuses or name not in self.peers:
            raise PlaneError("refused")
        transfer = Transfer(name, list(copies), self.hangs, self.damages, self.fails)
        self.under_way.append(transfer)
        return transfer

    def is_done(self, transfer: Transfer) -> bool:
        if transfer.hangs:
            return False
        if transfer.fails:
            raise PlaneError("disconnected")
        for copy in transfer.copies:
            ctypes.memmove(copy.address, copy.source_address, copy.size_bytes)
            if transfer.damages:
                ctypes.memset(copy.address + copy.size_bytes - 1, 0, 1)
        transfer.done = True
        return True

    def release(self, transfer: Transfer) -> None:
        self.under_way.remove(transfer)

    def close(self) -> None: ...


class CopyDisk(QueuedDisk[bytes]):
    """A disk within the process, whose jobs end when they are polled, unless the test holds them."""

    def __init__(self, slot: Callable[[int], memoryview]) -> None:
        super().__init__()
        self._slot = slot
        # The most jobs that were under way at once.
        self.most_jobs = 0
        # Whether jobs stay under way, and whether those that end fail.
        self.hangs = self.fails = False

    def _queue(self, job: DiskJob) -> bool:
        is_queued = super()._queue(job)
        self.most_jobs = max(self.most_jobs, len(self.jobs))
        return is_queued

    def poll(self) -> list[DiskJob]:
        if self.hangs:
            return []
        jobs, self.jobs = self.jobs, []
        return list(map(self._end, jobs))

    def _end(self, job: DiskJob) -> DiskJob:
        record = self.records.get(job.key)
        ok = job.ok and not self.fails and (job.kind == "write" or record is not None)
        if ok and job.kind == "write":
            self.records[job.key] = bytes(self._slot(job.slot))
            self._changes.append((True, job.key))
        elif ok and record is not None:
            self._slot(job.slot)[:] = record
        elif job.ok and job.kind == "read" and record is not None:
            del self.records[job.key]
            self._changes.append((False, job.key))
        return job._replace(ok=ok)

    def clear(self) -> None:
        super().clear()
        # Messages that were under way belong to the time before.
        self.jobs = [job._replace(ok=False) for job in self.jobs]


class Engine:
    """One engine: it stores what it computes, lends it, and fetches what it lacks."""

    def __init__(
        self,
        world: World,
        name: str,
        num_slots: int,
        identity: bytes = IDENTITY,
        root: bytes = b"0",
        has_disk: bool = False,
        lends_disk: bool = False,
    ) -> None:
        self.world, self.name = world, name
        self.source = PeerSource(name, 1)
        self.memory = np.zeros(num_slots * CHUNK_BYTES, np.uint8)
        self.weights = 0
        self.facts = PeerFacts(identity, root)
        base = int(self.memory.ctypes.data)
        checksum = ChunkChecksum("crc32", self.slot, CHUNK_BYTES)
        self.slots = Memory(base, CHUNK_BYTES, CHUNK_BYTES, checksum)
        self.cpu = CpuTier(num_slots, LruPolicy(num_slots))
        self.plane = CopyPlane(name.encode())
        self.fetcher = InlineFetcher(self)
        self.peers = PeerTier(self.fetcher, TIMEOUT_S, world.clock)
        self.disk = CopyDisk(self.slot)
        max_lent = max(1, num_slots // 2)
        guests = Guests(self.cpu, max_lent, CHUNK_BYTES) if lends_disk else None
        self.tiers = Tiering(self.cpu, self.disk if has_disk else None, peers=self.peers, guests=guests)
        self.lender = Lender(
            self.tiers, lambda: self.facts, Welcome(name.encode(), base, CHUNK_BYTES), checksum, max_lent
        )
        # Chunks that were announced and not withdrawn.
        self.announced: set[OffloadKey] = set()
        self.announced_on_disk: set[OffloadKey] = set()
        # The last hand-over to this engine.
        self.warming: Warming | None = None
        # Whether its thread that lends stands still.
        self.stopped = False

    def slot(self, number: int) -> memoryview:
        return memoryview(self.memory.data)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def store(self, *keys: OffloadKey) -> None:
        """Compute chunks of one prompt and store them."""
        begun = self.tiers.begin_store(keys, PromotionRequest())
        if begun is not None:
            for stored, slot in zip(*begun, strict=True):
                self.slot(slot)[:] = content(stored, self.weights)
            self.tiers.end_store(begun[0], True)
        self.read_changes()

    def reset(self) -> None:
        """Take other weights."""
        self.weights += 1
        self.tiers.reset()
        self.read_changes()

    def wish(self, source: Engine, timeout_s: float | None = None) -> PromotionRequest:
        """Return a request that names a source."""
        return PromotionRequest(peer=self.peers.wish(SourceWish(source.source, timeout_s)))

    def warm(
        self, source: Engine, share: int = 0, num_shares: int = 1, max_chunks: int = 1_000, within_s: float = 60.0
    ) -> Warming:
        """Begin a hand-over from a source."""
        warm = Warm(1, source.name, source.source.port, share, num_shares, max_chunks * CHUNK_BYTES, within_s)
        warming = Warming(warm, CHUNK_BYTES, self.cpu.num_slots, TIMEOUT_S, self.world.clock)
        self.tiers.warm(warming)
        self.warming = warming
        return warming

    def step(self, wish: PromotionRequest, *keys: OffloadKey) -> list[LookupAnswer]:
        """Look chunks up in one step of the engine, and let one turn of all threads pass."""
        answers = [self.tiers.look_up(key, wish) for key in keys]
        self.tiers.end_step()
        self.world.turn()
        self.read_changes()
        return answers

    def reads_from_disk(self, key: OffloadKey) -> bool:
        """Return whether a chunk is being read from this engine's disk, or may be."""
        return self.disk.holds(key) or key in self.tiers._reads.values()

    def fetch(self, wish: PromotionRequest, *keys: OffloadKey, steps: int = 20) -> list[LookupAnswer]:
        """Step until every answer is final."""
        for _ in range(steps):
            answers = self.step(wish, *keys)
            if all(answer in (LookupAnswer.YES, LookupAnswer.NO) for answer in answers):
                break
        return answers

    def read_changes(self) -> None:
        """Check the announcements against the books and the memory."""
        on_disk = self.announced_on_disk
        for change in self.tiers.take_changes():
            announced = self.announced if change.medium is Medium.CPU else on_disk
            for changed in change.keys:
                assert (changed in announced) is change.removed
                announced ^= {changed}
        assert on_disk == set(self.disk.records)
        assert self.announced == set(self.cpu.ready_keys())
        for ready in self.announced:
            held = bytes(self.slot(self.cpu.slot(ready)))
            assert held == content(ready, self.weights), "a chunk that can be loaded has another content"


class BusyThread(Executor):
    """A thread that never gets a core, so that whoever waits for it does its work."""

    def submit(self, *arguments: Any, **options: Any) -> Future[Any]:
        return Future()


class InlineFetcher:
    """The links of one engine, without a thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.links: dict[PeerSource, PeerLink] = {}
        self.outcomes: list[Outcome] = []

    def submit(self, source: PeerSource, work: Question | PullJob) -> None:
        link = self.links.get(source) or self._link(source)
        link.begin(work, self.engine.world.now_s)

    def _link(self, source: PeerSource) -> PeerLink:
        engine = self.engine

        def send(message: ToSource) -> None:
            engine.world.to_source.append((engine, source, encode(message)))

        link = PeerLink(engine.plane, engine.slots, lambda: engine.facts, send, self.outcomes.append, BusyThread())
        self.links[source] = link
        return link

    def poll(self) -> list[Outcome]:
        outcomes, self.outcomes[:] = list(self.outcomes), []
        return outcomes

    def close(self) -> None:
        for link in self.links.values():
            link.close()


class World:
    """All engines by name, the messages between them, and the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.engines: dict[str, Engine] = {}
        # The engines that borrow, by the names of their connections and the numbers of their loans.
        self.borrowers: dict[tuple[bytes, int], Engine] = {}
        self.to_source: deque[tuple[Engine, PeerSource, bytes]] = deque()
        self.to_reader: deque[tuple[Engine, PeerSource, bytes]] = deque()
        # Changes the answers of sources, for answers that are wrong.
        self.forge: Callable[[ToReader], ToReader] = lambda answer: answer

    def clock(self) -> float:
        return self.now_s

    def engine(self, name: str, num_slots: int = 8, **options: Any) -> Engine:
        """Return a new engine, in the place of an earlier one of that name."""
        self.engines[name] = Engine(self, name, num_slots, **options)
        return self.engines[name]

    def turn(self, rng: random.Random | None = None) -> None:
        """Let every thread do what it can; with `rng`, only a part of it."""
        for queue in (self.to_source, self.to_reader):
            for _ in range(len(queue)):
                if rng is None or rng.random() < 0.8:
                    self._deliver(queue)
        for engine in self.engines.values():
            if not engine.stopped:
                for name, answer in engine.lender.advance():
                    assert isinstance(answer, Lent)
                    reader = self.borrowers[name, answer.number]
                    self.to_reader.append((reader, engine.source, encode(self.forge(answer))))
            engine.lender.expire(self.now_s)
            for link in list(engine.fetcher.links.values()):
                link.tick(self.now_s)
            engine.tiers.advance_warming()

    def _deliver(self, queue: deque[tuple[Engine, PeerSource, bytes]]) -> None:
        if not queue:
            return
        reader, source, frame = queue.popleft()
        if queue is self.to_reader:
            if self.engines.get(reader.name) is reader:
                reader.fetcher.links[source].received(read_by_reader(frame), self.now_s)
            return
        lender = self.engines.get(source.host)
        if lender is None:
            return
        if lender.stopped:
            queue.append((reader, source, frame))
            return
        message = read_by_source(frame)
        assert message is not None and not isinstance(message, HandOverRequest)
        connection = reader.name.encode()
        if isinstance(message, Borrow):
            self.borrowers[connection, message.number] = reader
        answer = lender.lender.answer(connection, message, self.now_s)
        if answer is not None:
            self.to_reader.append((reader, source, encode(self.forge(answer))))


def is_ready(engine: Engine, key: OffloadKey) -> bool:
    return engine.cpu.state(key) is ChunkState.READY
