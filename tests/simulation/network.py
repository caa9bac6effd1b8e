# SPDX-License-Identifier: Apache-2.0
"""A network in memory: hosts, listeners, and connections that deliver objects in order, late, or not at all.

As with TCP, a connection delivers everything in order or breaks. A partition holds back what is under way; once it
heals, everything arrives, unless an end has given up meanwhile. A host that dies loudly closes its connections; one
that dies silently leaves its peers with half-open ones, which break only when it is up again and gets something, perhaps
what was sent while it was down.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import Process, VirtualLoop

# Within a data centre, mostly; one packet in a hundred is sent again.
LATENCY_S = (0.0001, 0.001)
RESEND_SHARE = 0.01
RESEND_S = (0.01, 0.25)
# How long a SYN waits before it is sent again.
SYN_S = 1.0
# How long the first packet without an answer waits before it is sent again; each further time takes twice as long.
RETRANSMIT_S = 0.2


class Host:
    """A machine with one address, and the connections and listeners on it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.is_up = True
        self.listeners: dict[int, Callable[[End], None]] = {}
        self.ends: dict[End, None] = {}


class End:
    """One end of a connection. Its owner sets `on_data` and `on_closed`; both are called in system events."""

    peer: End

    def __init__(self, network: Network, host: Host, number: int) -> None:
        self.network, self.host, self.number = network, host, number
        # The token of the router that has this end, if clients want to know it.
        self.token = ""
        self.is_open = True
        # Whether the owner reads no more for now, as a slow reader does.
        self.is_full = False
        self.on_data: Callable[[Any], None] = lambda data: None
        self.on_closed: Callable[[Exception | None], None] = lambda error: None
        # The data sent to this end: (due time, data); data is an `_Ending` after the last.
        self.inbound: deque[tuple[float, Any]] = deque()
        self._last_due_s = 0.0
        self._scheduled = False
        # Whether packets are sent again and again, as the peer's machine died without a word.
        self._retransmits = False
        # Since when nothing can arrive here.
        self.stalled_s: float | None = None

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def backlog(self) -> int:
        """How many objects the peer has not taken yet."""
        return len(self.peer.inbound)

    def send(self, data: Any) -> None:
        """Send an object to the peer."""
        if not self.is_open:
            return
        if self.network.is_silent(self):
            self._retransmit()
            return
        self.peer._enqueue(data)

    def _retransmit(self) -> None:
        if not self._retransmits:
            self._retransmits = True
            self._transmit(RETRANSMIT_S)

    def _transmit(self, again_s: float) -> None:
        """Send a packet to a machine that does not know the connection, until it is up and says so."""
        network = self.network
        if not self.is_open:
            return
        if self.peer.host.is_up and not network.is_cut(self):
            network.loop.after(network.latency_s(), lambda: self._end(ConnectionResetError("reset by peer")))
        else:
            network.loop.after(again_s, lambda: self._transmit(2 * again_s))

    def close(self, error: Exception | None = None) -> None:
        """Close the connection; the peer learns of it after everything that was sent."""
        if self.is_open:
            self.is_open = False
            self.host.ends.pop(self, None)
            self.peer._enqueue(_Ending(error))

    def vanish(self) -> None:
        """End without telling the peer."""
        self.is_open = False
        self.host.ends.pop(self, None)
        self.peer.stalled_s = self.network.loop.time()
        if self.inbound and self.peer.is_open:
            # Bytes that were under way are sent again.
            self.peer._retransmit()

    def resume(self) -> None:
        """Take objects again."""
        self.is_full = False
        self._schedule()

    def _enqueue(self, data: Any) -> None:
        if not self.is_open:
            return
        due_s = max(self._last_due_s, self.network.loop.time() + self.network.latency_s())
        self._last_due_s = due_s
        self.inbound.append((due_s, data))
        self._schedule()

    def _schedule(self) -> None:
        if self.inbound and not self._scheduled and not self.is_full and not self.network.is_cut(self):
            self._scheduled = True
            self.network.loop.at(self.inbound[0][0], self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if not self.is_open or self.is_full or self.network.is_cut(self) or not self.inbound:
            return
        now_s = self.network.loop.time()
        while self.inbound and self.inbound[0][0] <= now_s and self.is_open and not self.is_full:
            _, data = self.inbound.popleft()
            if isinstance(data, _Ending):
                self._end(data.error)
            else:
                self.on_data(data)
        self._schedule()

    def _end(self, error: Exception | None) -> None:
        if self.is_open:
            self.is_open = False
            self.host.ends.pop(self, None)
            self.on_closed(error)


class _Ending:
    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Cut(enum.Enum):
    """The ways in which a partition affects what is under way."""

    # Packets vanish; ends that wait long enough get everything after it heals.
    SILENT = "silent"
    # A firewall resets the connections, and lets none be opened.
    RESET = "reset"


class Network:
    """All hosts, and the partitions between them."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self._rng = rng
        self.hosts: dict[str, Host] = {}
        self._by_address: dict[str, Host] = {}
        self._cuts: dict[tuple[str, str], Cut] = {}
        # Multiplies latencies between all hosts.
        self.slowness = 1.0

    def add_host(self, name: str, address: str) -> Host:
        """Return a new host."""
        host = self.hosts[name] = self._by_address[address] = Host(name, address)
        return host

    def host_of(self, process: Process) -> Host:
        """Return the host on which a process runs."""
        return self.hosts[process.name]

    def latency_s(self) -> float:
        """Return the time that a packet takes."""
        rng = self._rng
        if rng.random() < RESEND_SHARE:
            return rng.uniform(*RESEND_S)
        return self.slowness * rng.uniform(*LATENCY_S)

    # -- faults

    def cut(self, first: Host, second: Host, how: Cut) -> None:
        """Let nothing pass between two hosts."""
        self._cuts[_pair(first, second)] = how
        now_s = self.loop.time()
        for end in [*first.ends, *second.ends]:
            if _pair(end.host, end.peer.host) == _pair(first, second) and end.is_open:
                if how is Cut.RESET:
                    end._end(ConnectionResetError("reset"))
                    end.peer._end(ConnectionResetError("reset"))
                elif end.stalled_s is None:
                    end.stalled_s = now_s

    def heal(self, first: Host, second: Host) -> None:
        """Let everything pass between two hosts again."""
        if self._cuts.pop(_pair(first, second), None) is None:
            return
        for end in [*first.ends, *second.ends]:
            if _pair(end.host, end.peer.host) == _pair(first, second):
                if end.peer.is_open:
                    end.stalled_s = None
                end._schedule()

    def is_cut(self, end: End) -> bool:
        """Return whether nothing reaches this end now."""
        return bool(self._cuts) and _pair(end.host, end.peer.host) in self._cuts

    def is_silent(self, end: End) -> bool:
        """Return whether this end's peer is gone without a word."""
        return end.stalled_s is not None and not end.peer.is_open

    def are_cut(self, first: Host, second: Host) -> bool:
        """Return whether a partition is between two hosts."""
        return _pair(first, second) in self._cuts

    def drop_connections(self, first: Host, second: Host) -> None:
        """Reset all connections between two hosts."""
        for end in [*first.ends, *second.ends]:
            if _pair(end.host, end.peer.host) == _pair(first, second) and end.is_open:
                end._end(ConnectionResetError("reset"))
                end.peer._end(ConnectionResetError("reset"))

    def fell(self, host: Host, *, silently: bool) -> None:
        """End all connections and listeners of a host, loudly or without a word."""
        host.listeners.clear()
        for end in list(host.ends):
            if silently:
                end.vanish()
            else:
                end.close(None)

    # -- connections

    def dial(
        self,
        host: Host,
        address: str,
        port: int,
        opened: Callable[[End], None],
        refused: Callable[[], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Open a connection; call `opened` or `refused`, or neither for as long as nobody answers."""
        target = self._by_address.get(address)

        def arrive() -> None:
            if not is_wanted() or not host.is_up:
                return
            if target is None or not target.is_up or (cut := self._cuts.get(_pair(host, target))) is Cut.SILENT:
                self.loop.after(SYN_S, arrive)
                return
            accept = target.listeners.get(port)
            if cut is Cut.RESET or accept is None:
                self.loop.after(self.latency_s(), lambda: refused() if is_wanted() else None)
                return
            near, far = End(self, host, self.loop.next_number()), End(self, target, self.loop.next_number())
            near.peer, far.peer = far, near
            host.ends[near] = target.ends[far] = None
            accept(far)

            def answer() -> None:
                if is_wanted() and host.is_up and near.is_open:
                    opened(near)
                else:
                    near.close()

            self.loop.after(self.latency_s(), answer)

        self.loop.after(self.latency_s(), arrive)


def _pair(first: Host, second: Host) -> tuple[str, str]:
    return (first.name, second.name) if first.name < second.name else (second.name, first.name)
