# SPDX-License-Identifier: Apache-2.0
"""An independent engine patch for tests of its readers: real sockets, a ledger of counters, and faults on demand.

It runs in the test's own event loop. It is written from the protocol alone and shares only the structs with the patch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import zmq

from kvrouter.events.patch.messages import (
    REPORT_TOPIC,
    CatalogMessage,
    DeclaredCatalog,
    Events,
    Heartbeat,
    Hello,
    HelloRequest,
    PlaceSummary,
    Refused,
    Reply,
    Report,
    ReportEvent,
    ReportRemoved,
    ReportStored,
    Request,
    SnapshotPart,
    SnapshotRequest,
)

Context = zmq.Context[zmq.Socket[bytes]]
# (group_idx, medium) -> hash -> copies
Ledger = dict[tuple[int | None, str], Counter[int]]

HOST = "tcp://127.0.0.1"


def packed(*hashes: int) -> bytes:
    return b"".join(block_hash.to_bytes(8, "big") for block_hash in hashes)


def stored(*hashes: int, group_idx: int = 0, medium: str = "GPU") -> ReportStored:
    return ReportStored(packed(*hashes), group_idx, medium, 16)


def removed(*hashes: int, group_idx: int = 0, medium: str = "GPU") -> ReportRemoved:
    return ReportRemoved(packed(*hashes), group_idx, medium)


def apply(ledger: Ledger, events: list[ReportEvent]) -> None:
    """Apply the events of one message to the ledger, as their documentation says; drop places that become empty."""
    for event in events:
        if isinstance(event, ReportStored | ReportRemoved):
            place = ledger.setdefault((event.group_idx, event.medium), Counter())
            for at in range(0, len(event.hashes), 8):
                block_hash = int.from_bytes(event.hashes[at : at + 8], "big")
                place[block_hash] += 1 if isinstance(event, ReportStored) else -1
                if place[block_hash] <= 0:
                    del place[block_hash]
            if not place:
                del ledger[event.group_idx, event.medium]
        else:
            for key in [key for key in ledger if key[1] == event.medium]:
                del ledger[key]


def summary(ledger: Ledger) -> list[PlaceSummary]:
    return [
        PlaceSummary(group_idx, medium, len(held), sum(held.values()), sum(held) % 2**64)
        for (group_idx, medium), held in ledger.items()
    ]


def parts(ledger: Ledger, request_id: int, epoch: str, next_seq: int, size: int = 2) -> list[SnapshotPart]:
    snapshot: list[SnapshotPart] = []

    def part(hashes: list[int], **fields: object) -> None:
        # A conversion, as mypy cannot check that `fields` are those of `SnapshotPart`.
        snapshot.append(
            msgspec.convert(
                {
                    "id": request_id,
                    "epoch": epoch,
                    "started_s": 1.0,
                    "next_seq": next_seq,
                    "index": len(snapshot),
                    "type": "snapshot",
                }
                | {"hashes": packed(*hashes)}
                | fields,
                SnapshotPart,
            )
        )

    for (group_idx, medium), held in ledger.items():
        hashes = list(held)
        for at in range(0, len(hashes), size):
            chunk = hashes[at : at + size]
            copied = [(block_hash, held[block_hash]) for block_hash in chunk if held[block_hash] > 1]
            part(chunk, group_idx=group_idx, medium=medium, copied=copied)
    part([], last=True, places=summary(ledger))
    return snapshot


class FakeReporter:
    """The sockets of one patch. `async with` serves its requests; the test calls the rest."""

    def __init__(
        self, context: Context, *, epoch: str = "a" * 16, requests: str = f"{HOST}:*", reports: str = f"{HOST}:*"
    ) -> None:
        self.epoch = epoch
        self.ledger: Ledger = {}
        self.next_seq = 0
        self.heartbeat_s = 60.0
        self.catalog: DeclaredCatalog | None = None
        self.catalog_version = 0
        self.requests: list[Request] = []
        # Functions that answer the next snapshot requests in place of `honest`.
        self.snapshot_script: deque[Callable[[SnapshotRequest], list[Reply | bytes]]] = deque()
        # Whether no request is answered.
        self.mute = False
        # The endpoint of reports that `Hello` names; None: the real one.
        self.reports_said: str | None = None
        # XPUB receives the subscriptions: no snapshot is served before there is a subscriber, so that messages are lost
        # only if the test says so.
        self._pub = context.socket(zmq.XPUB)
        self._followed = False
        self._later: list[tuple[bytes, SnapshotRequest]] = []
        self._router = context.socket(zmq.ROUTER)
        self._pub.sndhwm = 0
        self._router.sndhwm = 0
        self.reports_endpoint = self._bind(self._pub, reports)
        self.requests_endpoint = self._bind(self._router, requests)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeReporter:
        self._task = asyncio.get_running_loop().create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._pub.close(linger=0)
        self._router.close(linger=0)

    def asked(self, kind: type[Request]) -> int:
        return sum(isinstance(request, kind) for request in self.requests)

    def publish(self, *events: ReportEvent, lost: bool = False, dropped: int = 0) -> int:
        """Send one message, unless it is to be `lost` on the way, and return its seq."""
        apply(self.ledger, list(events))
        seq = self.next_seq
        self.next_seq += 1
        if not lost:
            self.send(seq, Events(self.epoch, 1.0, 2.0, list(events), dropped=dropped))
        return seq

    def beat(self) -> None:
        self.send(
            self.next_seq,
            Heartbeat(self.epoch, 1.0, 2.0, self.heartbeat_s, summary(self.ledger), self.catalog_version),
        )

    def declare(self, catalog: DeclaredCatalog, *, lost: bool = False) -> None:
        self.catalog = catalog
        self.catalog_version += 1
        if not lost:
            self.send(self.next_seq, CatalogMessage(self.epoch, 1.0, self.catalog_version, catalog))

    def send(self, seq: int, message: Report) -> None:
        self.send_raw(REPORT_TOPIC, seq.to_bytes(8, "big"), msgspec.msgpack.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def begin_life(self, epoch: str) -> None:
        """Behave like a restarted engine on the same sockets: another epoch, and no resident blocks."""
        self.epoch = epoch
        self.ledger = {}
        self.next_seq = 0

    def honest(self, request: SnapshotRequest) -> list[Reply | bytes]:
        return list(parts(self.ledger, request.id, self.epoch, self.next_seq))

    async def _serve(self) -> None:
        while True:
            while self._pub.poll(0):
                self._followed = self._pub.recv()[:1] == b"\x01"
            while self._router.poll(0):
                client, empty, payload = self._router.recv_multipart()
                assert empty == b""
                request: Request = msgspec.msgpack.decode(payload, type=Request)
                self.requests.append(request)
                if isinstance(request, SnapshotRequest):
                    self._later.append((client, request))
                else:
                    self._reply(client, request)
            if self._followed:
                for client, snapshot_request in self._later:
                    self._reply(client, snapshot_request)
                self._later.clear()
            await asyncio.sleep(0.001)

    def _reply(self, client: bytes, request: Request) -> None:
        for reply in self._answers(request):
            encoded = reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply)
            self._router.send_multipart([client, b"", encoded])

    def _answers(self, request: Request) -> list[Reply | bytes]:
        if self.mute:
            return []
        if isinstance(request, HelloRequest):
            reports = self.reports_said or self.reports_endpoint
            return [
                Hello(
                    request.id,
                    self.epoch,
                    1.0,
                    self.next_seq,
                    reports,
                    self.heartbeat_s,
                    catalog_version=self.catalog_version,
                    catalog=self.catalog,
                )
            ]
        return (self.snapshot_script.popleft() if self.snapshot_script else self.honest)(request)

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
        # ZMQ frees the address of a closed socket with a delay.
        for _ in range(1_000):
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                zmq.select([], [], [], 0.01)
        else:
            raise AssertionError(f"{endpoint} stays in use")
        bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return bound.rstrip("\0") or endpoint


def refused(retry_s: float | None = None) -> Callable[[SnapshotRequest], list[Reply | bytes]]:
    return lambda request: [Refused(request.id, "busy", retry_s)]
