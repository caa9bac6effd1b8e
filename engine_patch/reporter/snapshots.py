# SPDX-License-Identifier: Apache-2.0
"""Serves snapshots: the blocks that were resident at one moment, to several clients at once, one part at a time.

Each client has its own cursor over a frozen ledger; clients that requested at the same seq share one ledger. A client
that does not read delays no other: its turn passes, and after a while without progress its snapshot is abandoned. No
sockets here: `send` sends a payload and returns the result.
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
    """The result of sending a payload to a client."""

    YES = enum.auto()
    # The client has no room, because it has read too little of its earlier messages.
    FULL = enum.auto()
    # The client is gone.
    GONE = enum.auto()


class Moment(msgspec.Struct, frozen=True, eq=False):
    """The blocks that were resident before message `next_seq` of an epoch."""

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
        # A part that is encoded and not sent yet.
        self.pending: bytes | None = None


class SnapshotService:
    """All snapshots under way.

    Each `now_s` is in monotonic seconds.
    """

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
        """Begin a snapshot of the present moment, and return False if too many are under way.

        A client's new request replaces its former one.

        Args:
            address: The client.
            request_id: The id of the client's request.
            epoch: The present epoch.
            next_seq: The present seq.
            freeze: Freezes the ledger; called if no other client has a snapshot of this epoch and seq.
            now_s: The present time.
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
        """Send one part to the first client in turn that has room; return False if none has."""
        for _ in range(len(self._clients)):
            client = self._clients.popleft()
            if client.pending is None:
                client.pending = self._encoder.encode(next(client.parts))
            outcome = self._send(client.address, client.pending)
            if outcome is Sent.GONE:
                self._counters.snapshots_gone += 1
            elif outcome is Sent.YES:
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
        """End all snapshots, and return (address, request id) of each."""
        requests = [(client.address, client.request_id) for client in self._clients]
        self._clients.clear()
        return requests

    def _go_on(self, client: _Client) -> None:
        try:
            client.pending = self._encoder.encode(next(client.parts))
        except StopIteration:
            self._counters.snapshots_served += 1
        else:
            self._clients.append(client)


def parts(moment: Moment, request_id: int) -> Iterator[SnapshotPart]:
    """Yield all parts of a snapshot; the last one has the sums of all places."""
    part = partial(SnapshotPart, request_id, moment.epoch, moment.started_s, moment.next_seq)
    index = 0
    for place in moment.ledger.places:
        summary = place.summary
        names = (summary.group_idx, summary.medium, summary.ownership, summary.locality)
        for hashes, copied in place.slices(SNAPSHOT_PART_BLOCKS):
            yield part(index, hashes, *names, copied)
            index += 1
    yield part(index, last=True, places=moment.ledger.summaries())
