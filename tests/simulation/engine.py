# SPDX-License-Identifier: Apache-2.0
"""A simulated engine on its own host: the lives of `model_engine.py`, behind simulated sockets and HTTP.

It runs in system events, and its randomness is its own: what it computes does not depend on who listens.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvrouter.events.patch.messages import (
    REPORT_TOPIC,
    HelloRequest,
    Report,
    ReportEvent,
    Request,
    SnapshotRequest,
)
from kvrouter.events.vllm.wire import END_SEQ, SEQ_BYTES, WireEvent
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.registration import NO_PATCH, CatalogSpec, Registration
from tests.simulation.network import End, Host, Network
from tests.simulation.tcp import serve_tcp
from tests.simulation.zmq_network import Frames, Publisher, Responder
from tests.support.model_engine import (
    LAYOUTS,
    PROMPT_TOKENS,
    PROMPTS,
    QUIET_PROMPT,
    SCHEMES,
    UNKNOWN_SCHEME,
    Life,
)

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

MODEL = "m"
EVENTS_PORT, REPLAY_PORT, REQUESTS_PORT, REPORTS_PORT, HTTP_PORT = 5557, 5558, 5559, 5560, 8000
TOPIC = b"kv-events"
HEARTBEAT_S = 1.0
# An engine in a data centre computes hundreds of batches a second; a few are enough for the order of things.
STEP_S = (0.01, 0.8)
QUIET_STEP_S = 1.0
RINGS = (8, 200, 200)
# How many messages wait for a slow reader.
HIGH_WATER_MARKS = (20, 10_000, 10_000)


class Kind(enum.Enum):
    """The streams that an engine offers to its readers."""

    # vLLM's topic, and a replay endpoint.
    STOCK = "stock"
    # The topic alone.
    PLAIN = "plain"
    # The engine patch.
    PATCHED = "patched"


@dataclass
class LifeSpan:
    """When a life ended, and when each of its batches was sent."""

    life: Life
    began_s: float
    ended_s: float | None = None
    # Whether the host died with it, so that its peers learn nothing.
    silently: bool = False
    sent_s: list[float] = field(default_factory=list)


class Engine:
    """One engine. `restart` and `die` begin and end its lives."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        network: Network,
        host: Host,
        rng: random.Random,
        note: Callable[[str, str], None],
        *,
        has_http: bool,
    ) -> None:
        self.name, self.kind, self.host = name, kind, host
        self.worker = WorkerKey(MODEL, name)
        self.spans: list[LifeSpan] = []
        self.life: Life | None = None
        # Whether its threads stand still.
        self.is_stopped = False
        # Whether the replay endpoint or snapshots are not served, and how long each answer takes.
        self.is_mute = False
        self.slow_s = 0.0
        self.is_quiet = False
        # The seq at which the quiet end's second round began, from which a plain engine's blocks must be credited.
        self.first_quiet = 0
        self._has_http = has_http
        self._network, self._rng, self._note = network, rng, note
        self._loop: VirtualLoop = network.loop
        self._generation = 0

    @property
    def registration(self) -> Registration:
        """The registration of its worker."""
        base = f"tcp://{self.host.address}"
        return Registration(
            self.worker,
            events=f"{base}:{EVENTS_PORT}",
            replay=f"{base}:{REPLAY_PORT}" if self.kind is Kind.STOCK else None,
            patch=f"{base}:{REQUESTS_PORT}" if self.kind is Kind.PATCHED else NO_PATCH,
            url=f"http://{self.host.address}:{HTTP_PORT}" if self._has_http else None,
            catalog=CatalogSpec(offload_blocks_per_chunk=1),
        )

    # -- lives

    def begin(self) -> None:
        """Begin a life, perhaps with other flags than the one before."""
        rng = self._rng
        before = self.spans[-1].life if self.spans else None
        layout, scheme = rng.choice(LAYOUTS), rng.choice(SCHEMES)
        if before is not None and before.scheme is not UNKNOWN_SCHEME and rng.random() < 0.5:
            layout, scheme = before.layout, before.scheme
        patched = self.kind is Kind.PATCHED and (self.is_quiet or rng.random() < 0.9)
        life = self.life = Life(len(self.spans), layout, scheme, ring=rng.choice(RINGS), patched=patched)
        life.epoch = f"{rng.getrandbits(64):016x}"
        life.start_s = 1_000.0 + self._loop.time()
        self.spans.append(LifeSpan(life, self._loop.time()))
        self._generation += 1
        self.host.is_up = True
        self.is_stopped = False
        hwm = rng.choice(HIGH_WATER_MARKS)
        self._events = Publisher(self._network, self.host, EVENTS_PORT, hwm=hwm)
        if self.kind is Kind.STOCK:
            Responder(self._network, self.host, REPLAY_PORT, self._replay, self._answer_pause_s)
        if patched:
            self._reports = Publisher(self._network, self.host, REPORTS_PORT, hwm=hwm)
            Responder(self._network, self.host, REQUESTS_PORT, self._answer, self._answer_pause_s)
            self._every(HEARTBEAT_S, self._beat)
        if self._has_http:
            serve_tcp(self.host, HTTP_PORT, self._serve_http)
        self._next_step()
        self._note(self.name, f"begins life {life.number}: {layout.name}, {scheme.label}, patched {patched}, hwm {hwm}")

    def die(self, *, silently: bool) -> None:
        """End the life; silently if its host loses power."""
        if self.life is None:
            return
        span = self.spans[-1]
        span.ended_s, span.silently = self._loop.time(), silently
        self.life = None
        self._generation += 1
        self.host.is_up = not silently
        self._network.fell(self.host, silently=silently)
        self._note(self.name, f"dies{' without a word' if silently else ''} at seq {span.life.next_seq - 1}")

    def quieten(self) -> None:
        """Publish rarely and keep all promises from now on."""
        self.is_quiet = True
        self.is_stopped = self.is_mute = False
        self.slow_s = 0.0
        self.host.is_up = True
        needs_patch = self.kind is Kind.PATCHED and self.life is not None and not self.life.patched
        if self.life is None or needs_patch:
            self.die(silently=False)
            # A fault that ends meanwhile may begin the next life.
            self._loop.after(1.0, lambda: None if self.life is not None else self.begin())

    # -- publishing

    def _every(self, interval_s: float, call: Callable[[], None]) -> None:
        generation = self._generation

        def tick() -> None:
            if self._generation == generation:
                if not self.is_stopped:
                    call()
                self._loop.after(interval_s, tick)

        self._loop.after(interval_s * self._rng.random(), tick)

    def _next_step(self) -> None:
        generation = self._generation

        def tick() -> None:
            if self._generation == generation:
                if not self.is_stopped:
                    self.publish()
                self._next_step()

        self._loop.after(QUIET_STEP_S if self.is_quiet else self._rng.uniform(*STEP_S), tick)

    def publish(self) -> None:
        """Take one step of the scheduler, and send what it changed."""
        life, rng = self.life, self._rng
        if life is None:
            return
        if self.is_quiet:
            self._say(life, *life.compute(QUIET_PROMPT, PROMPT_TOKENS))
            self._say(life, *life.trim())
            return
        draw = rng.random()
        if draw < 0.5:
            events = life.compute(rng.randrange(PROMPTS), rng.randrange(8, PROMPT_TOKENS + 1))
        elif draw < 0.75:
            events = life.evict(rng, rng.randrange(1, 6))
        elif draw < 0.85:
            events = life.offload(rng)
        elif draw < 0.87:
            events = life.clear()
        else:
            events = life.trim()
        if draw > 0.995:
            life.skip()
            self.spans[-1].sent_s.append(self._loop.time())
            return
        self._say(life, *events, readable=draw < 0.985)

    def _say(self, life: Life, wire: list[WireEvent], report: list[ReportEvent], *, readable: bool = True) -> None:
        seq = life.next_seq
        payload, events = life.say(wire, report, readable=readable)
        self.spans[-1].sent_s.append(self._loop.time())
        self._events.publish([TOPIC, seq.to_bytes(SEQ_BYTES, "big"), payload])
        if life.patched:
            self._report(seq, events)

    def _beat(self) -> None:
        if self.life is not None:
            self._report(self.life.next_seq, self.life.heartbeat())

    def _report(self, seq: int, message: Report) -> None:
        self._reports.publish([REPORT_TOPIC, seq.to_bytes(SEQ_BYTES, "big"), msgspec.msgpack.encode(message)])

    # -- answers

    def _answer_pause_s(self) -> float:
        return self.slow_s + self._rng.uniform(0.0, 0.1)

    def _replay(self, request: Frames) -> list[Frames]:
        if self.life is None or self.is_stopped or self.is_mute:
            return []
        start = int.from_bytes(request[-1], "big")
        batches = [(seq, payload) for seq, payload in self.life.ring if seq >= start]
        return [[b"", TOPIC, seq.to_bytes(SEQ_BYTES, "big"), payload] for seq, payload in batches] + [
            [b"", TOPIC, END_SEQ, b""]
        ]

    def _answer(self, request: Frames) -> list[Frames]:
        life = self.life
        if life is None or self.is_stopped:
            return []
        message: Request = msgspec.msgpack.decode(request[-1], type=Request)
        if isinstance(message, HelloRequest):
            reports = f"tcp://*:{REPORTS_PORT}"
            hello = msgspec.structs.replace(life.hello(), id=message.id, reports=reports, heartbeat_s=HEARTBEAT_S)
            return [[b"", msgspec.msgpack.encode(hello)]]
        if not isinstance(message, SnapshotRequest) or self.is_mute:
            return []
        return [[b"", msgspec.msgpack.encode(part)] for part in life.parts(message.id)]

    def _serve_http(self, end: End) -> Callable[[bytes], None]:
        unread = b""

        def take(data: bytes) -> None:
            nonlocal unread
            unread += data
            while b"\r\n\r\n" in unread:
                head, _, unread = unread.partition(b"\r\n\r\n")
                path = head.split(b" ")[1]
                self._loop.after(self._rng.uniform(0.0, 0.01), partial(reply, path))

        def reply(path: bytes) -> None:
            if self.life is None or self.is_stopped:
                return
            page = b"process_start_time_seconds %.2f\n" % self.life.start_s if path == b"/metrics" else b"{}"
            end.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))

        return take
