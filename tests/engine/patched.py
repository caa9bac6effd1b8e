# SPDX-License-Identifier: Apache-2.0
"""The engine patch, applied to this process for a while, and an oracle that is watched over the patch's own sockets."""

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
    """A log handler that keeps the level and the message of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


# Everything that the patch replaces in vLLM's modules and classes; all else is replaced on instances.
PLACES: tuple[tuple[Any, str], ...] = (
    (Scheduler, "__init__"),
    (core.EngineCore, "add_lora"),
    (core, "init_none_hash"),
)


@contextmanager
def patched(
    environment: dict[str, str] | None = None, start: StartReporter | None = None, applied: bool = True
) -> Iterator[Records]:
    """Apply the patch to vLLM, yield the patch's log records, and restore vLLM.

    Args:
        environment: The environment that the patch reads; `ENVIRONMENT` by default.
        start: Replaces the function that starts the reporter.
        applied: The expected result of `patch`.
    """
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
    """Return the seq of the patch's last message, once everything that was published is sent."""
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
    """An oracle whose patch is received from its first event on, and which remembers every request that it runs."""

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
        # A client that has received a heartbeat is subscribed.
        self._next_seq, _ = self.peer.next_heartbeat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.peer.close()
        self._context.term()

    def _request(self, *args: Any, **kwargs: Any) -> Any:
        request = super()._request(*args, **kwargs)
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
        """Return the new messages, in order and none missing, and apply their events to `copies`.

        If `published` is given, wait until the patch has sent at least that many messages in all.
        """
        if published is not None:
            eventually(lambda: self.peer.hello().next_seq >= published)
        # The reporter's thread must have taken everything published before it is queried.
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
        """Return the resident copies, from the objects that decide reuse."""
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
        """Check that messages, a snapshot and a heartbeat report the resident copies exactly, but for a withheld scope.

        The scope's media are compared as if they held nothing.
        """
        self.hear()
        held = Counter({key: copies for key, copies in self.held().items() if not withheld.covers(key[1])})
        too_many, too_few = self.copies - held, held - self.copies
        assert not too_many and not too_few, f"{len(too_many)} too many, {len(too_few)} too few"
        assert copies_of(self.peer.snapshot()) == held
        beat = self.beat()
        reported = {(p.group_idx, p.medium, p.ownership): (p.blocks, p.copies, p.digest) for p in beat.places}
        assert reported == summed(held)

    def beat(self) -> Any:
        """Return a heartbeat that was sent after all messages so far."""
        seq, beat = self.peer.next_heartbeat()
        while seq < self._next_seq:
            seq, beat = self.peer.next_heartbeat()
        return beat

    # The true positions, from the requests alone.

    def ends(self) -> dict[int, int]:
        """Return, for each hash, how many tokens of its prompt it covers."""
        return {
            short_hash(block_hash): (i + 1) * self.hash_block_size
            for request in self.requests
            for i, block_hash in enumerate(request.block_hashes)
        }

    def parents(self) -> dict[tuple[int, int], int | None]:
        """Return, for each hash and block size, the hash of the block before it; None at the start of a prompt."""
        parents: dict[tuple[int, int], int | None] = {}
        sizes = {spec.block_size for spec in self.group_set.specs} | {self.hash_block_size}
        for request in self.requests:
            hashes = [short_hash(block_hash) for block_hash in request.block_hashes]
            for size in sizes:
                back = size // self.hash_block_size
                for i, block_hash in enumerate(hashes):
                    parents[block_hash, size] = hashes[i - back] if i >= back else None
        return parents


def positions_of(event: ReportStored) -> Iterator[tuple[int, int]]:
    """Yield the hash and the end (in tokens) of each block of a stored event, in the event's order."""
    hashes = iter(unpack_hashes(event.hashes).tolist())
    for end, count in event.runs:
        for i in range(count):
            yield next(hashes), end + i * event.block_size


class StockTopic:
    """A reader of vLLM's own event sockets that keeps every raw frame."""

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
        """Return the frames of a replay from the first batch on, repeating the request until it reaches this seq."""
        while True:
            self._replay.send_multipart([b"", bytes(8)])
            answer = []
            while (frames := self._replay.recv_multipart())[2] != self._END:
                answer.append(frames)
            if answer and int.from_bytes(answer[-1][2], "big") >= last_seq:
                return [*answer, frames]

    def live(self) -> list[list[bytes]]:
        """Return the live frames received by now.

        After `replay`, these are all frames from the first received batch on.
        """
        frames = []
        while self._live.poll(200):
            frames.append(self._live.recv_multipart())
        return frames

    def close(self) -> None:
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()
