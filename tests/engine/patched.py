# SPDX-License-Identifier: Apache-2.0
"""The engine patch applied to this process for a while, and an oracle that is watched over the patch's own sockets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Self

import zmq
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core

from kvrouter.engine_patch.hooks.event_tap import EventTap
from kvrouter.engine_patch.hooks.publisher import ATTRIBUTE
from kvrouter.engine_patch.plugin import StartReporter, patch
from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.engine_patch.reporter.translate import short_hash
from kvrouter.engine_patch.setup.settings import SWITCH
from kvrouter.events.patch.messages import Events, ReportStored, unpack_hashes
from tests.engine.group_sets import GroupSet
from tests.engine.oracle import Oracle
from tests.engine.workload import PromptTree
from tests.support.report_peer import TIMEOUT_MS, Copies, Peer, apply, copies_of, eventually, summed

ENVIRONMENT = {
    SWITCH: "1",
    "KVROUTER_PATCH_REQUESTS": "tcp://127.0.0.1:0",
    "KVROUTER_PATCH_REPORTS": "tcp://127.0.0.1:0",
    "KVROUTER_PATCH_HEARTBEAT_S": "0.05",
}
VOCAB_SIZE = 512
MAX_UNFINISHED = 5


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


# Everything that the patch exchanges in vLLM's modules and classes; the rest is on instances.
PLACES: tuple[tuple[Any, str], ...] = (
    (Scheduler, "__init__"),
    (core.EngineCore, "add_lora"),
    (core, "init_none_hash"),
)


@contextmanager
def patched(
    environment: dict[str, str] | None = None, start: StartReporter | None = None, applied: bool = True
) -> Iterator[Records]:
    """vLLM with the patch; gives what the patch logs. applied: what `patch` is to say."""
    log, records = logging.Logger("kvrouter"), Records()
    log.addHandler(records)
    constructor = EventPublisherFactory._registry["zmq"]
    before = [getattr(owner, name) for owner, name in PLACES]
    try:
        assert patch(ENVIRONMENT if environment is None else environment, log, start) is applied
        yield records
    finally:
        EventPublisherFactory._registry["zmq"] = constructor
        for (owner, name), value in zip(PLACES, before, strict=True):
            setattr(owner, name, value)


def last_reported(oracle: Oracle) -> int:
    """Seq of the patch's last message, once everything that was published is sent."""
    reporter: Any = tap_of(oracle).reporter
    eventually(lambda: not len(reporter._queue) and reporter._queue._asleep)
    return int(reporter._stream.next_seq) - 1


def tap_of(oracle: Oracle) -> EventTap:
    tap = getattr(oracle.scheduler, ATTRIBUTE)
    assert isinstance(tap, EventTap)
    return tap


def reporter_of(oracle: Oracle) -> Reporter:
    reporter = tap_of(oracle).reporter
    assert isinstance(reporter, Reporter)
    return reporter


class WatchedOracle(Oracle):
    """An oracle whose patch is heard from its first event on; every request that it runs is remembered."""

    def __init__(
        self,
        group_set: GroupSet,
        model: Path,
        rng: Random,
        offload: dict[str, Any] | None = None,
        extra_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(group_set, model, rng, offload)
        self.requests: list[Any] = []
        self.extra_args = extra_args
        self.messages: list[Events] = []
        self.copies: Copies = Counter()
        self.tree = PromptTree(rng, VOCAB_SIZE)
        self.reporter = reporter_of(self)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peer = Peer(self._context, self.reporter)
        # A client that hears a heartbeat is subscribed.
        self._next_seq, _ = self.peer.next_heartbeat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.peer.close()
        self._context.term()

    def _request(self, *given: Any, **named: Any) -> Any:
        request = super()._request(*given, **named)
        if self.extra_args is not None:
            request.kv_cache_report_mode = self.extra_args["kv_cache_report_mode"]
        self.requests.append(request)
        return request

    def work(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.unfinished < MAX_UNFINISHED:
                self.submit(self.tree.request())
            if self._rng.random() < 0.03:
                self.abort_one()
            self.step(self.tree)

    def drain(self) -> None:
        while self.unfinished:
            self.step(self.tree)
        for _ in range(6):  # the connector learns what finished, and its last transfers end
            self.step(self.tree)

    def hear(self, published: int | None = None) -> list[Events]:
        """All messages so far, in order and none missing; their events are applied to `copies`.

        published: how many there must be in all, at least; waits for them.
        """
        if published is not None:
            eventually(lambda: self.peer.hello().next_seq >= published)
        # The reporter's thread takes what was published before it is queried.
        eventually(lambda: not len(self.reporter._queue))
        until = self.peer.hello().next_seq
        fresh = []
        while self._next_seq < until:
            seq, message = self.peer.next_events()
            assert seq == self._next_seq and not message.dropped
            self._next_seq += 1
            fresh.append(message)
            apply(self.copies, message.events)
        self.messages += fresh
        return fresh

    def held(self) -> Copies:
        """What is resident, from the objects that decide it."""
        return self.held_on_gpu() + self.held_on_cpu()

    def held_on_gpu(self) -> Copies:
        held: Copies = Counter()
        for key, blocks in self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.items():
            copies = len(blocks) if isinstance(blocks, dict) else 1
            held[get_group_id(key), "GPU", None, short_hash(key[:-4])] += copies
        return held

    def held_on_cpu(self) -> Copies:
        held: Copies = Counter()
        if self.scheduler.connector is not None:
            policy = self.scheduler.connector.connector_scheduler.manager._policy
            for key, status in policy.chunks.items():
                if status.is_ready:
                    held[get_group_id(key), "CPU", None, short_hash(key[:-4])] += 1
        return held

    def verify(self, withheld: Scope = Scope.NOTHING) -> None:
        """The messages, a snapshot and a heartbeat all say exactly what is resident now, but for what is withheld."""
        self.hear()
        held = Counter({key: copies for key, copies in self.held().items() if not withheld.covers(key[1])})
        too_many, too_few = self.copies - held, held - self.copies
        assert not too_many and not too_few, f"{len(too_many)} too many, {len(too_few)} too few"
        assert copies_of(self.peer.snapshot()) == held
        beat = self.beat()
        said = {(p.group_idx, p.medium, p.ownership): (p.blocks, p.copies, p.digest) for p in beat.places}
        assert said == summed(held)

    def beat(self) -> Any:
        """A heartbeat that was sent after everything so far."""
        seq, beat = self.peer.next_heartbeat()
        while seq < self._next_seq:
            seq, beat = self.peer.next_heartbeat()
        return beat

    # Truth about positions, from the requests alone

    def ends(self) -> dict[int, int]:
        """Hash -> tokens of the prompt that it covers."""
        return {
            short_hash(block_hash): (i + 1) * self.hash_block_size
            for request in self.requests
            for i, block_hash in enumerate(request.block_hashes)
        }

    def parents(self) -> dict[tuple[int, int], int | None]:
        """(hash, block size) -> hash of the block before."""
        found: dict[tuple[int, int], int | None] = {}
        sizes = {spec.block_size for spec in self.group_set.specs} | {self.hash_block_size}
        for request in self.requests:
            hashes = [short_hash(block_hash) for block_hash in request.block_hashes]
            for size in sizes:
                back = size // self.hash_block_size
                for i, block_hash in enumerate(hashes):
                    found[block_hash, size] = hashes[i - back] if i >= back else None
        return found


def positions_of(event: ReportStored) -> Iterator[tuple[int, int]]:
    """(hash, end) of every block of a stored event, in its order."""
    hashes = iter(unpack_hashes(event.hashes).tolist())
    for end, count in event.runs:
        for i in range(count):
            yield next(hashes), end + i * event.block_size


class StockTopic:
    """vLLM's own event sockets, read raw: every frame counts."""

    _END = b"\xff" * 8

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._replay.connect(replay_endpoint)

    def replay(self, last_seq: int) -> list[list[bytes]]:
        """The frames of an answer that goes from the first batch to this seq; asks until the engine has sent it."""
        while True:
            self._replay.send_multipart([b"", bytes(8)])
            answer = []
            while (frames := self._replay.recv_multipart())[2] != self._END:
                answer.append(frames)
            if answer and int.from_bytes(answer[-1][2], "big") >= last_seq:
                return [*answer, frames]

    def live(self) -> list[list[bytes]]:
        """What has come by now; after `replay` that is everything from the first batch that came."""
        frames = []
        while self._live.poll(200):
            frames.append(self._live.recv_multipart())
        return frames

    def close(self) -> None:
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()
