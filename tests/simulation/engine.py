# SPDX-License-Identifier: Apache-2.0
"""Simulated engines on their own hosts: the lives of `model_engine.py`, behind simulated sockets and HTTP.

A server is one process with one HTTP address and a core for each data-parallel rank. A core is what a router follows as
one worker, so the laws call it an engine. Servers run in system events, and their randomness is their own: what they
compute does not depend on who listens.
"""

from __future__ import annotations

import enum
import math
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
from kvrouter.router.model.kvcache.block_hash import HashScheme
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
    UNNAMED,
    Layout,
    Life,
)

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

MODEL = "m"
# The ports of rank 0; those of rank 1 are one higher.
EVENTS_PORT, REPLAY_PORT, REQUESTS_PORT, REPORTS_PORT, HTTP_PORT = 5550, 5560, 5570, 5580, 8000
# The offset of the ports at which events and HTTP can be reached, too, so that a registration may move.
SECOND_ADDRESS = 1_000
TOPIC = b"kv-events"
HEARTBEAT_S = 1.0
# An engine in a data centre computes hundreds of batches a second; a few are enough for the order of things.
STEP_S = (0.01, 0.8)
QUIET_STEP_S = 1.0
RINGS = (8, 200, 200)
# How long a slow engine pauses between the parts of an answer.
MOST_PART_PAUSE_S = 0.2
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
    # When it last sent no batch at a step, because it stood still or computed nothing.
    idle_s: float = 0.0


@dataclass(frozen=True)
class Flags:
    """The flags with which a server begins, the same for all its cores."""

    layout: Layout
    scheme: HashScheme
    # How many batches the replay endpoint remembers, and how many messages wait for a slow reader.
    ring: int
    hwm: int
    patched: bool


class Engine:
    """One core of a server. `begin` and `end` are called by the server."""

    def __init__(self, server: Server, rank: int, rng: random.Random) -> None:
        self.name = f"{server.name}.{rank}" if rank else server.name
        self.kind, self.host, self.rank = server.kind, server.host, rank
        self.worker = WorkerKey(MODEL, server.name, rank)
        self.spans: list[LifeSpan] = []
        self.life: Life | None = None
        # Whether its threads stand still, and whether it computes nothing, so that only the patch's heartbeats come.
        self.is_stopped = False
        self.is_idle = False
        # Whether the patch misses the next step, and until when routers cannot know that it missed one: until its next
        # heartbeat.
        self.is_unreported = False
        self.proven_s = 0.0
        # Whether the replay endpoint or snapshots are not served, and how long each answer takes.
        self.is_mute = False
        self.slow_s = 0.0
        # When it last did not answer replays at once.
        self.unanswered_s = 0.0
        self.is_quiet = False
        # The seq at which all routers showed the worker live in the quiet end, from which a plain engine's blocks must be
        # credited, and the epochs that those showed it in which it was live, at the last look.
        self.first_quiet = 0
        self.followed: tuple[str | None, ...] = ()
        self._server = server
        self._network, self._rng, self._note = server.network, rng, server.note
        self._loop: VirtualLoop = server.network.loop
        self._generation = 0

    def registration(self, *, is_moved: bool = False, is_draining: bool = False) -> Registration:
        """Return the registration of its worker; `is_moved` names the second addresses of events and HTTP."""
        base, offset = f"tcp://{self.host.address}", SECOND_ADDRESS if is_moved else 0
        return Registration(
            self.worker,
            events=f"{base}:{EVENTS_PORT + self.rank + offset}",
            replay=f"{base}:{REPLAY_PORT + self.rank}" if self.kind is Kind.STOCK else None,
            patch=f"{base}:{REQUESTS_PORT + self.rank}" if self.kind is Kind.PATCHED else NO_PATCH,
            url=f"http://{self.host.address}:{HTTP_PORT + offset}" if self._server.has_http else None,
            catalog=CatalogSpec(offload_blocks_per_chunk=1),
            draining=is_draining,
        )

    # -- lives

    def begin(self, flags: Flags) -> None:
        """Begin a life."""
        network, host, rank = self._network, self.host, self.rank
        life = self.life = Life(
            len(self.spans), flags.layout, flags.scheme, ring=flags.ring, patched=flags.patched, dp_rank=rank
        )
        life.epoch = f"{self._rng.getrandbits(64):016x}"
        life.start_s = 1_000.0 + self._loop.time()
        self.spans.append(LifeSpan(life, self._loop.time()))
        self._generation += 1
        self.is_stopped = False
        self._events = Publisher(network, host, EVENTS_PORT + rank, hwm=flags.hwm)
        host.listeners[EVENTS_PORT + rank + SECOND_ADDRESS] = host.listeners[EVENTS_PORT + rank]
        if self.kind is Kind.STOCK:
            Responder(network, host, REPLAY_PORT + rank, self._replay, self._answer_pause_s, self._part_pause_s)
        if flags.patched:
            self._reports = Publisher(network, host, REPORTS_PORT + rank, hwm=flags.hwm)
            Responder(network, host, REQUESTS_PORT + rank, self._answer, self._answer_pause_s, self._part_pause_s)
            self._every(HEARTBEAT_S, self._beat)
        self._next_step()

    def end(self, *, silently: bool) -> None:
        """End the life."""
        if self.life is not None:
            span = self.spans[-1]
            span.ended_s, span.silently = self._loop.time(), silently
            self.life = None
            self.is_unreported, self.proven_s = False, min(self.proven_s, self._loop.time())
            self._generation += 1
            self._note(self.name, f"dies{' without a word' if silently else ''} at seq {span.life.next_seq - 1}")

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
                if self.is_stopped or self.is_mute or self.slow_s:
                    self.unanswered_s = self._loop.time()
                if self.is_stopped or self.is_idle:
                    self.spans[-1].idle_s = self._loop.time()
                else:
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
            if self.is_unreported and events.events:
                self.is_unreported, self.proven_s = False, math.inf
                events = msgspec.structs.replace(events, events=[])
            self._report(seq, events)

    def _beat(self) -> None:
        if self.life is not None:
            self._report(self.life.next_seq, self.life.heartbeat())
            self.proven_s = min(self.proven_s, self._loop.time())

    def _report(self, seq: int, message: Report) -> None:
        self._reports.publish([REPORT_TOPIC, seq.to_bytes(SEQ_BYTES, "big"), msgspec.msgpack.encode(message)])

    # -- answers

    def _answer_pause_s(self) -> float:
        return self.slow_s + self._rng.uniform(0.0, 0.1)

    def _part_pause_s(self) -> float:
        return self._rng.uniform(0.0, MOST_PART_PAUSE_S) if self.slow_s else 0.0

    def _replay(self, request: Frames) -> list[Frames]:
        if self.life is None or self.is_stopped or self.is_mute:
            self.unanswered_s = self._loop.time()
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
            reports = f"tcp://*:{REPORTS_PORT + self.rank}"
            hello = msgspec.structs.replace(life.hello(), id=message.id, reports=reports, heartbeat_s=HEARTBEAT_S)
            return [[b"", msgspec.msgpack.encode(hello)]]
        if not isinstance(message, SnapshotRequest) or self.is_mute:
            return []
        return [[b"", msgspec.msgpack.encode(part)] for part in life.parts(message.id)]


class Server:
    """One engine process with its cores. `begin` and `die` begin and end its lives."""

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
        ranks: int,
    ) -> None:
        self.name, self.kind, self.host, self.network, self.note = name, kind, host, network, note
        self.has_http = has_http
        self._rng, self._loop = rng, network.loop
        self._is_quiet = False
        self._flags: Flags | None = None
        self._start_s = 0.0
        self.engines = [Engine(self, rank, random.Random(rng.getrandbits(64))) for rank in range(ranks)]

    @property
    def is_up(self) -> bool:
        """Whether the process runs."""
        return self.engines[0].life is not None

    def begin(self) -> None:
        """Begin a life, perhaps with other flags than the one before."""
        if self.is_up:
            return
        rng, before = self._rng, self._flags
        layouts = LAYOUTS if self.kind is Kind.PATCHED else (*LAYOUTS, UNNAMED)
        layout, scheme = rng.choice(layouts), rng.choice(SCHEMES if self._is_quiet else (*SCHEMES, UNKNOWN_SCHEME))
        if before is not None and rng.random() < 0.5:
            layout, scheme = before.layout, before.scheme
        patched = self.kind is Kind.PATCHED and (self._is_quiet or rng.random() < 0.9)
        flags = self._flags = Flags(layout, scheme, rng.choice(RINGS), rng.choice(HIGH_WATER_MARKS), patched)
        self.host.is_up = True
        self._start_s = 1_000.0 + self._loop.time()
        for engine in self.engines:
            engine.begin(flags)
        if self.has_http:
            for port in (HTTP_PORT, HTTP_PORT + SECOND_ADDRESS):
                serve_tcp(self.host, port, self._serve_http)
        self.note(
            self.name,
            f"begins life {len(self.engines[0].spans) - 1}: {layout.name}, {scheme.label}, patched {patched}, "
            f"hwm {flags.hwm}",
        )

    def die(self, *, silently: bool) -> None:
        """End the life; silently if its host loses power."""
        if self.is_up:
            for engine in self.engines:
                engine.end(silently=silently)
            self.host.is_up = not silently
            self.network.fell(self.host, silently=silently)

    def quieten(self) -> None:
        """Publish rarely and keep all promises from now on."""
        self._is_quiet = True
        for engine in self.engines:
            engine.is_quiet = True
            engine.is_stopped = engine.is_mute = engine.is_idle = engine.is_unreported = False
            engine.slow_s = 0.0
        self.host.is_up = True
        flags = self._flags
        needs_patch = self.kind is Kind.PATCHED and flags is not None and not flags.patched
        needs_scheme = flags is not None and flags.scheme is UNKNOWN_SCHEME
        if needs_scheme:
            self._flags = None
        if not self.is_up or needs_patch or needs_scheme:
            self.die(silently=False)
            # A fault that ends meanwhile may begin the next life.
            self._loop.after(1.0, self.begin)

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
            if not self.is_up or self.engines[0].is_stopped:
                return
            page = self._metrics() if path == b"/metrics" else b"{}"
            end.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))

        return take

    def _metrics(self) -> bytes:
        """Return the metrics page, which names each rank. No request runs: clients reserve, and send nothing."""
        lines = [b"process_start_time_seconds %.2f\n" % self._start_s]
        for engine in self.engines:
            lines += [
                b'vllm:num_requests_%b{engine="%d",model_name="m"} 0.0\n' % (gauge, engine.rank)
                for gauge in (b"running", b"waiting")
            ]
        return b"".join(lines)
