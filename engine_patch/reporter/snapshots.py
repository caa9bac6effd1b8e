# SPDX-License-Identifier: Apache-2.0
"""Serving snapshots: what was resident at one moment, to several clients at once, one part at a time.

Each client has a cursor of its own over a frozen ledger; clients that requested at the same seq share one. A
client that does not read delays no other: its turn passes, and after a while without progress it is abandoned. No
sockets here: `send` returns what became of a payload.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.reporter.ledger import FrozenLedger
from kvrouter.events.patch.messages import SNAPSHOT_PART_BLOCKS, SnapshotPart


class Sent(enum.Enum):
    """What became of a payload for a client."""

    YES = enum.auto()
    # The client has read too little of what it was sent.
    FULL = enum.auto()
    # The client is gone.
    GONE = enum.auto()


class Moment(msgspec.Struct, frozen=True, eq=False):
    """What was resident before message `next_seq` of an epoch."""

    epoch: str
    started_s: float
    next_seq: int
    ledger: FrozenLedger


class _Client:
    def __init__(self, address: bytes, request_id: int, moment: Moment, now_s: float) -> None:
        self.address = address
        self.request_id = request_id
        self.moment = moment
        self.progress_s = now_s
        self.parts = parts(moment, request_id)
        # Encoded and not taken yet.
        self.pending: bytes | None = None


class SnapshotService:
    """All snapshots under way. now_s: seconds, monotonic."""

    def __init__(
        self, send: Callable[[bytes, bytes], Sent], *, max_clients: int, timeout_s: float, counters: Counters
    ) -> None:
        self._send = send
        self._max_clients = max_clients
        self._timeout_s = timeout_s
        self._counters = counters
        self._clients: deque[_Client] = deque()
        self._encoder = msgspec.msgpack.Encoder()

    def __len__(self) -> int:
        return len(self._clients)

    def request(
        self, address: bytes, request_id: int, epoch: str, next_seq: int, freeze: Callable[[], Moment], now_s: float
    ) -> bool:
        """Begins a snapshot of this moment; `freeze` makes it if no other client has it. False: too many are under way.

        A client's new request replaces its former one.
        """
        for client in self._clients:
            if client.address == address:
                self._clients.remove(client)
                break
        if len(self._clients) >= self._max_clients:
            return False
        for client in self._clients:
            if client.moment.epoch == epoch and client.moment.next_seq == next_seq:
                moment = client.moment
                break
        else:
            moment = freeze()
        self._clients.append(_Client(address, request_id, moment, now_s))
        return True

    def turn(self, now_s: float) -> bool:
        """Sends one part to the client whose turn it is; to the next one when it takes none. False: no client took
        any."""
        for _ in range(len(self._clients)):
            client = self._clients.popleft()
            if client.pending is None:
                client.pending = self._encoder.encode(next(client.parts))
            sent = self._send(client.address, client.pending)
            if sent is Sent.GONE:
                self._counters.snapshots_gone += 1
            elif sent is Sent.YES:
                client.pending = None
                client.progress_s = now_s
                self._go_on(client)
                return True
            elif now_s - client.progress_s > self._timeout_s:
                self._counters.snapshots_abandoned += 1
            else:
                self._clients.append(client)
        return False

    def void(self) -> list[tuple[bytes, int]]:
        """Ends all snapshots: (address, request id) of those that were under way."""
        ended = [(client.address, client.request_id) for client in self._clients]
        self._clients.clear()
        return ended

    def _go_on(self, client: _Client) -> None:
        try:
            client.pending = self._encoder.encode(next(client.parts))
        except StopIteration:
            self._counters.snapshots_served += 1
        else:
            self._clients.append(client)


def parts(moment: Moment, request_id: int) -> Iterator[SnapshotPart]:
    """All parts, the last one with what the others add up to."""
    part = partial(SnapshotPart, request_id, moment.epoch, moment.started_s, moment.next_seq)
    index = 0
    for place in moment.ledger.places:
        summary = place.summary
        names = (summary.group_idx, summary.medium, summary.ownership, summary.locality)
        for hashes, copied in place.slices(SNAPSHOT_PART_BLOCKS):
            yield part(index, hashes, *names, copied)
            index += 1
    yield part(index, last=True, places=moment.ledger.summaries())
