# SPDX-License-Identifier: Apache-2.0
"""This router's index in virtual time: its own ingest, mirror and matcher, fed by simulated replicas.

There are no sockets and no Redis.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrouter.events.patch.messages import PeerAddress
from kvrouter.events.vllm.codec import BatchDecoder, encode_batch
from kvrouter.events.vllm.stream_items import Batch, Connected, Restarted, fingerprint
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.offload_connectors import OFFLOADING
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.kvcache.resume_rule import ResumeRule, resume_rule
from kvrouter.router.model.workers.registration import CatalogSpec, GroupSpec, Registration
from kvrouter.router.model.workers.stream_state import credited
from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.shapes import FULL_KINDS, Geometry
from kvrouter.simulator.http.event_stream import to_wire

MODEL = "trace"
# From the end of an engine's step until answers show its events: a flush of 2 ms, the store and the log
# (docs/reference/benchmarks.md).
EVENT_LAG_S = 0.005
MIRROR_BYTES = 1 << 31
# Any port will do, as nothing is sent.
PEER_PORT = 1


class VirtualFleet:
    """The part of the core that `Placer` uses, on a mirror that is made of simulated events."""

    def __init__(
        self,
        geometry: Geometry,
        workers: int,
        *,
        has_cpu_tier: bool = False,
        pool_blocks: Sequence[int] = (),
        token_bytes: int = 0,
    ) -> None:
        """Show workers that hold nothing yet.

        Args:
            geometry: The groups of the workers' model.
            workers: How many workers there are.
            has_cpu_tier: Whether any worker has a CPU tier; a worker without one publishes no events of it.
            pool_blocks: The sizes of the GPU pools, as engines report them; empty if they do not.
            token_bytes: The bytes of a token, if workers lend each other blocks; 0 if they do not.
        """
        self.keys = [WorkerKey(MODEL, f"w{number}") for number in range(workers)]
        # Each worker has a host of its own.
        self._peers = {
            key: PeerAddress(key.worker_id, PEER_PORT, MODEL, token_bytes=token_bytes)
            for key in (self.keys if token_bytes else ())
        }
        self.now_s = 0.0
        # The block size of full attention, in which other routers count; without such a group, the largest.
        self.block_tokens = max(
            [group.block_size for group in geometry.groups if group.kind in FULL_KINDS]
            or [group.block_size for group in geometry.groups]
        )
        self._geometry = geometry
        # The catalog that the engine patch would declare: a chunk's size is not on the wire.
        self._catalog = CatalogSpec(
            tuple(
                GroupSpec(n, group.kind, group.block_size, group.sliding_window, group.attention_chunk)
                for n, group in enumerate(geometry.groups)
            ),
            # The simulated tier is that of vLLM's OffloadingConnector, with one block in a chunk.
            offload_blocks_per_chunk=1 if has_cpu_tier else None,
            offload_connector=OFFLOADING if has_cpu_tier else None,
        )
        self._mirror = Mirror(MIRROR_BYTES)
        self._matcher = Matcher(self._mirror, SegmentMemory(0))
        self._epochs = itertools.count()
        self._ingests = [self._ingest(key) for key in self.keys]
        self._seqs = [itertools.count() for _ in self.keys]
        self._under_way: deque[tuple[float, int, PendingCommit]] = deque()
        self._plans: tuple[int, HashPlans] | None = None
        for key in self.keys:
            self._mirror.begin_epoch(key, "")
        for key, blocks in zip(self.keys, pool_blocks, strict=False):
            self._mirror.writes.of(MODEL).state(key, blocks)

    def _ingest(self, key: WorkerKey) -> Ingest:
        ingest = Ingest(
            Registration(key, catalog=self._catalog),
            seed=None,
            decoder=BatchDecoder(),
            new_epoch=lambda: f"e{next(self._epochs)}",
        )
        ingest.apply(Connected(), 0.0)
        return ingest

    def restarted(self, number: int) -> None:
        """Follow a new process of this worker: another stream from seq 0 on, in an epoch that begins empty.

        The change shows at once, as a lost connection does. Events of the old process that do not show yet are lost.
        """
        self._under_way = deque(entry for entry in self._under_way if entry[1] != number)
        self._seqs[number] = itertools.count()
        ingest = self._ingests[number]
        ingest.apply(Restarted(ingest.held.seq or 0, 0, "another process answers"), self.now_s)
        commit = ingest.held.take()
        assert commit is not None
        self._show(number, commit)

    def published(self, number: int, events: list[CacheEvent], now_s: float) -> None:
        """Apply the events of a replica's step that ends now, through the wire's encoding and the router's ingest."""
        payload = encode_batch(now_s, [to_wire(event, self._geometry) for event in events], 0)
        ingest = self._ingests[number]
        ingest.apply(Batch(next(self._seqs[number]), payload, fingerprint(payload), False), now_s)
        commit = ingest.held.take()
        if commit is not None:
            self._under_way.append((now_s + EVENT_LAG_S, number, commit))

    def held_blocks(self) -> list[NDArray[np.uint64]]:
        """Return the hashes of all blocks that each worker holds by its events, of every group and tier."""
        return [
            np.concatenate([blocks.hashes(place) for place in blocks.places] or [np.empty(0, np.uint64)])
            for blocks in (ingest.held.blocks for ingest in self._ingests)
        ]

    def catch_up(self) -> None:
        """Apply the changes that were published at least `EVENT_LAG_S` ago."""
        while self._under_way and self._under_way[0][0] <= self.now_s:
            _, number, commit = self._under_way.popleft()
            self._show(number, commit)
        while self._mirror.sweep():
            pass

    def _show(self, number: int, commit: PendingCommit) -> None:
        key = self.keys[number]
        if commit.opens_epoch:
            self._mirror.begin_epoch(key, commit.epoch)
        for change in commit.changes:
            self._mirror.discard(key, change.place, change.removed)
            self._mirror.add(key, change.place, change.added)

    def _views(self) -> list[WorkerView]:
        return [
            WorkerView(
                key, None, ingest.state, credited(ingest.state, False), ingest.reason, ingest.held.epoch, ingest.profile.catalog,
                ingest.profile.identity.scheme, {}, peer=self._peers.get(key),
            )
            for key, ingest in zip(self.keys, self._ingests, strict=True)
        ]  # fmt: skip

    def _current_plans(self) -> HashPlans:
        # A catalog is complete after the first events of each group.
        if self._plans is None or self._plans[0] != self._mirror.version or self._plans[1].withheld:
            self._plans = (self._mirror.version, HashPlans.build(self._mirror, self._views()))
        return self._plans[1]

    async def hash_ahead(self, question: Question) -> None:
        """Do nothing, as requests come with their hashes."""

    def hits(self, question: Question) -> Sequence[Hit]:
        """Return every worker's hit."""
        return self._matcher.match(question, self._current_plans())

    def url(self, worker: WorkerKey) -> str | None:
        """Return None, as simulated replicas have no URL."""
        return None

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """Do nothing, as the simulation submits the request."""

    def writes(self, model: str) -> ModelWrites:
        """Return how often the model's caches were written."""
        return self._mirror.writes.of(model)

    def take_pool_sizes(self) -> None:
        """Do nothing, as the sizes of the pools are known from the start."""

    def hash_block_size(self, model: str) -> int:
        """Return the tokens that one hash covers."""
        return self._geometry.hash_block_size

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        """Return where a worker lends blocks; None if the workers do not."""
        return self._peers.get(worker)

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        """Return the rule for where the worker can resume a prompt; None if its catalog does not say."""
        return resume_rule(self._ingests[self.keys.index(worker)].profile.catalog)

    def workers(self) -> list[WorkerKey]:
        """Return the workers in the order of the fleet."""
        return self.keys
