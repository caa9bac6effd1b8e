# SPDX-License-Identifier: Apache-2.0
"""The patch's `Reporter` on free ports, and a plain reader of its sockets."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.engine_patch.setup.settings import ReporterSettings
from kvrouter.events.patch.messages import (
    REPORT_TOPIC,
    CatalogMessage,
    DeclaredCatalog,
    DeclaredGroup,
    Events,
    Heartbeat,
    Hello,
    HelloRequest,
    Refused,
    ReportCleared,
    ReportEvent,
    ReportRemoved,
    ReportStored,
    SnapshotPart,
    SnapshotRequest,
    pack_hashes,
    unpack_hashes,
)

CATALOG = DeclaredCatalog([DeclaredGroup(0, "full_attention", 16)], model_name="m", lora_paths={"a": "/a"})

ANY = "tcp://127.0.0.1:0"
TIMEOUT_MS = 10_000

# So long an interval that heartbeats come only at the start and with every new epoch.
SELDOM_S = 60.0

# `batch_seq` of the last message before a test begins.
JOINED = 10**9

Copies = Counter[tuple[int | None, str, str | None, int]]

_report = msgspec.msgpack.Decoder(Events | Heartbeat | CatalogMessage)
_reply = msgspec.msgpack.Decoder(Hello | SnapshotPart | Refused)


def stored(hashes: Iterable[int], medium: str = "GPU", group_idx: int | None = 0, **more: Any) -> ReportStored:
    return ReportStored(pack_hashes(hashes), group_idx, medium, **more)


def removed(hashes: Iterable[int], medium: str = "GPU", group_idx: int | None = 0, **more: Any) -> ReportRemoved:
    return ReportRemoved(pack_hashes(hashes), group_idx, medium, **more)


def said(*events: ReportEvent) -> Callable[[], list[ReportEvent]]:
    return lambda: list(events)


def fails() -> list[ReportEvent]:
    raise RuntimeError("not readable")


def start(context: zmq.Context[zmq.Socket[bytes]], **changes: Any) -> Reporter:
    """Start a reporter on free ports, with the epochs 0...0, 0...1 and so on.

    Args:
        context: The ZMQ context.
        **changes: Fields of `ReporterSettings` and arguments of `Reporter`, by name.
    """
    numbers = itertools.count()
    names = {name: changes.pop(name) for name in list(changes) if name in ReporterSettings.__struct_fields__}
    arguments: dict[str, Any] = {
        "requests": ANY,
        "reports": ANY,
        # A high mark, so that no message of a burst is dropped before the test has read it.
        "settings": ReporterSettings(**({"heartbeat_s": SELDOM_S, "report_hwm": 100_000} | names)),
        "context": context,
        "wall_clock": time.time,
        "clock": time.monotonic,
        "new_epoch": lambda: f"{next(numbers):016x}",
    }
    return Reporter(**(arguments | changes))


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, or fail after `TIMEOUT_MS`."""
    give_up_s = time.monotonic() + TIMEOUT_MS / 1_000
    while not condition():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.002)


def reporting() -> bool:
    """Return whether a reporter's thread runs."""
    return any(thread.name == "kvrouter-reporter" for thread in threading.enumerate())


def takes(reporter: Reporter) -> bool:
    """Publish a message, and return whether the reporter keeps it until it is sent."""
    message = said()
    reference = weakref.ref(message)
    reporter.publish(message, 0)
    del message
    return reference() is not None


class Peer:
    """A reader of a reporter: a SUB socket for reports and a DEALER socket for requests, with timeouts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], reporter: Reporter, *, hwm: int = 0) -> None:
        self.live = context.socket(zmq.SUB)
        self.ask = context.socket(zmq.DEALER)
        for socket in (self.live, self.ask):
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, hwm)
        self.live.subscribe(REPORT_TOPIC)
        self.live.connect(reporter.reports_endpoint)
        self.ask.connect(reporter.requests_endpoint)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.live.close()
        self.ask.close()

    def next(self) -> tuple[int, Events | Heartbeat | CatalogMessage]:
        topic, seq, payload = self.live.recv_multipart()
        assert topic == REPORT_TOPIC
        assert len(seq) == 8
        return int.from_bytes(seq, "big"), _report.decode(payload)

    def next_events(self) -> tuple[int, Events]:
        while True:
            seq, message = self.next()
            if isinstance(message, Events):
                return seq, message

    def next_heartbeat(self) -> tuple[int, Heartbeat]:
        while True:
            seq, message = self.next()
            if isinstance(message, Heartbeat):
                return seq, message

    def joined(self, reporter: Reporter) -> int:
        """Publish until a message arrives, read all messages, and return the next seq."""
        # The first heartbeat must not arrive in the middle of a test.
        eventually(lambda: reporter.counters.heartbeats > 0)
        self.live.setsockopt(zmq.RCVTIMEO, 20)
        heard = False
        while not heard:
            sent = reporter.counters.sent
            reporter.publish(said(), 0)
            # Without this wait, the reporter's queue could become full and drop messages.
            eventually(lambda: reporter.counters.sent > sent)  # noqa: B023
            try:
                self.next()
            except zmq.Again:
                continue
            heard = True
        self.live.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        reporter.publish(said(), JOINED)
        while True:
            seq, message = self.next_events()
            if message.batch_seq == JOINED:
                return seq + 1

    def send(self, request: object) -> None:
        self.ask.send_multipart([b"", msgspec.msgpack.encode(request)])

    def reply(self) -> Hello | SnapshotPart | Refused:
        empty, payload = self.ask.recv_multipart()
        assert empty == b""
        return _reply.decode(payload)

    def hello(self, request_id: int = 1) -> Hello:
        self.send(HelloRequest(request_id))
        reply = self.reply()
        assert isinstance(reply, Hello)
        assert reply.id == request_id
        return reply

    def snapshot(self, request_id: int = 2) -> list[SnapshotPart]:
        self.send(SnapshotRequest(request_id))
        return self.rest_of_snapshot()

    def rest_of_snapshot(self) -> list[SnapshotPart]:
        parts: list[SnapshotPart] = []
        while not parts or not parts[-1].last:
            reply = self.reply()
            assert isinstance(reply, SnapshotPart), reply
            parts.append(reply)
        return parts


def copies_of(parts: Iterable[SnapshotPart]) -> Copies:
    """Return the copies that the parts of a snapshot list, by (group, medium, owner, hash)."""
    copies: Copies = Counter()
    for part in parts:
        several = dict(part.copied)
        for block_hash in unpack_hashes(part.hashes).tolist():
            copies[part.group_idx, part.medium, part.ownership, block_hash] += several.get(block_hash, 1)
    return copies


def apply(copies: Copies, events: Iterable[ReportEvent]) -> None:
    """Apply events to the copies in a slow and obvious way, as an oracle."""
    for event in events:
        if isinstance(event, ReportCleared):
            for key in [key for key in copies if key[1] == event.medium]:
                if event.ownership is None or key[2] == event.ownership:
                    del copies[key]
            continue
        for block_hash in unpack_hashes(event.hashes).tolist():
            key = (event.group_idx, event.medium, event.ownership, block_hash)
            if isinstance(event, ReportStored):
                copies[key] += 1
            elif copies[key] > 1:
                copies[key] -= 1
            else:
                copies.pop(key, None)


def summed(copies: Copies) -> dict[tuple[int | None, str, str | None], tuple[int, int, int]]:
    """Return (blocks, copies, digest) of each place, as a heartbeat's summary has them."""
    sums: dict[tuple[int | None, str, str | None], tuple[int, int, int]] = {}
    for (group_idx, medium, owner, block_hash), count in copies.items():
        blocks, all_copies, digest = sums.get((group_idx, medium, owner), (0, 0, 0))
        sums[group_idx, medium, owner] = (blocks + 1, all_copies + count, (digest + block_hash) % 2**64)
    return sums


class Plug:
    """A message that blocks the reporter's thread until `pull`."""

    def __init__(self, reporter: Reporter) -> None:
        self._pulled = threading.Event()
        self._reached = threading.Event()
        reporter.publish(self, None)
        assert self._reached.wait(TIMEOUT_MS / 1_000)

    def __call__(self) -> list[ReportEvent]:
        self._reached.set()
        assert self._pulled.wait(TIMEOUT_MS / 1_000)
        return []

    def pull(self) -> None:
        self._pulled.set()
