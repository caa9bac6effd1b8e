# SPDX-License-Identifier: Apache-2.0
"""The clients of a world: they query routers, reserve workers and end their reservations, and judge the answers.

Some routers are reached over HTTP on the simulated network. At the others, clients call placement and `ask` in the process.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvrouter.router.base.common.errors import RouterError, StoreDown, UnknownSelection
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.route.placement.placement_request import PlacementRequest
from tests.simulation.engine import MODEL, Engine
from tests.simulation.http import LOST, HttpClient
from tests.simulation.laws import Laws
from tests.simulation.operator import Operator
from tests.simulation.router import Router
from tests.support.model_engine import PROMPT_TOKENS, PROMPTS, TOKENS

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

# Clients ask each router a few times a second.
ASK_S = (0.1, 0.8)
# How often a client repeats the end of a reservation while no router takes it.
END_AGAIN_S = 0.5
# The name of the tasks that clients' requests are.
CLIENT = "client"
# The path below a reservation, and the method, that end it or its prefill.
ENDINGS = {"release": ("DELETE", ""), "prefill_complete": ("POST", "/prefill_complete")}
# A reservation may be denied for so long after a fault of the store or of the network, and if its router did not publish
# its load for so long.
CALM_S = 5.0
# How many requests wait at a router that stands still, besides those that come at random.
MOST_WAITING = 4
# The share of requests that take long, and how long those take.
LONG_SHARE = 0.15
LONG_S = (3.0, 12.0)
USUAL_S = (1.0, 3.0)


class _Selected(msgspec.Struct):
    worker_id: str
    dp_rank: int


@dataclass
class Booking:
    """A reservation that a client made at the process with this token."""

    selection_id: str
    router: Router
    token: str
    # None if the answer was lost.
    worker: WorkerKey | None
    # How many lives its engine had had, and how often its registration ended: the end of one ends its reservations.
    lives: tuple[int, bool, int]
    # How many requests for its release succeeded, and whether one got no answer, so that it may have succeeded.
    releases: int = 0
    is_uncertain: bool = False
    # How many requests have no answer yet; those at a router that was killed never get one.
    pending: int = 0


class Clients:
    """All clients of one world."""

    def __init__(
        self,
        loop: VirtualLoop,
        routers: Sequence[Router],
        engines: Sequence[Engine],
        laws: Laws,
        operator: Operator,
        rng: random.Random,
        http: HttpClient,
        note: Callable[[str, str], None],
        count: Callable[[str], None],
    ) -> None:
        """Begin without requests.

        Args:
            loop: The loop of the world.
            routers: The routers.
            engines: The engines.
            laws: The judge.
            operator: Changes registrations, and so ends reservations.
            rng: Chooses questions and times.
            http: Reaches routers over HTTP.
            note: Adds a line to the history.
            count: Adds a text to the digest of the world.
        """
        self._loop, self._routers, self._laws, self._operator = loop, routers, laws, operator
        self._engines = {engine.worker: engine for engine in engines}
        self._rng, self._http, self._note, self._count = rng, http, note, count
        self._bookings: dict[str, Booking] = {}
        # Whether no more reservations are made.
        self.is_quiet = False
        # Until when the store or the whole network was disturbed.
        self.disturbed_s = 0.0

    def begin(self) -> None:
        """Ask all routers from now on."""
        for router in self._routers:
            self._ask_soon(router)

    def _ask_soon(self, router: Router) -> None:
        def ask() -> None:
            self._ask_soon(router)
            process = router.process
            if router.core is None or process is None:
                return
            rng = self._rng
            tokens = TOKENS[rng.randrange(PROMPTS)][: rng.randrange(8, PROMPT_TOKENS + 1)]
            is_query = rng.random() < 0.5 or self.is_quiet
            if router.has_http:
                process.call_soon(partial(self._laws.judge, router, whole=True))
                self._send(router, tokens, is_query=is_query)
            else:
                process.call_soon(partial(self._call, router, tokens, is_query=is_query))

        self._loop.after(self._rng.uniform(*ASK_S), ask)

    def _send(self, router: Router, tokens: list[int], *, is_query: bool) -> None:
        """Ask a router over HTTP."""
        address = router.host.address
        body: dict[str, object] = {"model": MODEL, "token_ids": tokens}
        if is_query:
            self._http.send(
                address,
                "POST",
                "/query",
                msgspec.json.encode(body),
                lambda status, reply, token: self._count(repr(reply)),
            )
            return
        selection_id = f"{self._rng.getrandbits(64):016x}"
        body |= {"selection_id": selection_id, "max_tokens": 16}

        def answered(status: int, reply: bytes, token: str) -> None:
            if status == HTTPStatus.OK:
                selected = msgspec.json.decode(reply, type=_Selected)
                self._book(selection_id, router, token, WorkerKey(MODEL, selected.worker_id, selected.dp_rank))
            elif status == LOST and router.token == token:
                # The router may have made the reservation, which the client ends without knowing the worker.
                booking = self._bookings[selection_id] = Booking(selection_id, router, token, None, (0, False, 0))
                self._end_later(booking, "release", END_AGAIN_S)

        self._http.send(address, "POST", "/select_and_reserve", msgspec.json.encode(body), answered)

    def _call(self, router: Router, tokens: list[int], *, is_query: bool) -> None:
        """Ask a router in its process, and judge what it answers from."""
        core, placer = router.core, router.placer
        if core is None or placer is None:
            return
        self._laws.judge(router, whole=True)
        question = Question(MODEL, len(tokens), token_ids=np.array(tokens, np.int64))
        try:
            if is_query:
                hits = core.ask(question)
                self._count(repr([(hit.worker, hit.tokens) for hit in hits]))
                return
            placement = placer.reserve(PlacementRequest(question, max_tokens=16))
        except RouterError:
            return
        worker = placement.choice.hit.worker
        if core.is_draining(worker):
            self._laws.broken = f"drains: {router.name} places a request on {worker.worker_id}, which drains"
        self._book(placement.selection_id, router, router.token, worker)

    def _book(self, selection_id: str, router: Router, token: str, worker: WorkerKey) -> None:
        """Note a reservation, and have it ended later."""
        self._note("client", f"reserves {selection_id} at {router.name} on {self._engines[worker].name}")
        booking = self._bookings[selection_id] = Booking(selection_id, router, token, worker, self._lives(worker))
        self._end_later(booking, "prefill_complete", self._rng.uniform(0.0, 1.0))
        lasts_s = LONG_S if self._rng.random() < LONG_SHARE else USUAL_S
        self._end_later(booking, "release", self._rng.uniform(*lasts_s))

    def _end_later(self, booking: Booking, how: str, after_s: float) -> None:
        """Have a reservation or its prefill ended through its router or another one, again until one has answered."""
        rng = self._rng

        def end() -> None:
            # Clients may reach another router the next time.
            router = rng.choice([booking.router, rng.choice(self._routers)])
            if not self._end(booking, how, router):
                self._loop.after(END_AGAIN_S, end)

        self._loop.after(after_s, end)

    def end_at(self, router: Router) -> None:
        """Release reservations of other routers through a router that stands still, as a proxy does that has not noticed."""
        open_bookings = [
            booking
            for booking in self._bookings.values()
            if booking.router is not router and not (booking.releases or booking.pending or booking.is_uncertain)
        ]
        for booking in self._rng.sample(open_bookings, min(MOST_WAITING, len(open_bookings))):
            self._end(booking, "release", router)

    def _end(self, booking: Booking, how: str, router: Router) -> bool:
        """Send a request that ends a reservation; return False if the router takes none."""
        placer, process = router.placer, router.process
        if placer is None or process is None:
            return False

        booking.pending += 1
        if router.has_http:
            method, below = ENDINGS[how]
            self._http.send(
                router.host.address,
                method,
                f"/reservations/{booking.selection_id}{below}",
                b"",
                lambda status, reply, token: self._take_end(booking, how, router, status),
            )
            return True

        async def finish() -> None:
            status = HTTPStatus.OK
            try:
                await getattr(placer, how)(booking.selection_id)
            except StoreDown:
                status = HTTPStatus.SERVICE_UNAVAILABLE
            except UnknownSelection:
                status = HTTPStatus.NOT_FOUND
            self._take_end(booking, how, router, status)

        process.start(finish(), CLIENT)
        return True

    def _take_end(self, booking: Booking, how: str, router: Router, status: int) -> None:
        """Take the answer to the request that ends a reservation or its prefill."""
        booking.pending -= 1
        if status == HTTPStatus.OK:
            if how == "release":
                booking.releases += 1
                if booking.releases > 1:
                    self._laws.broken = f"reservations: {booking.selection_id} was released twice"
            self._note("client", f"{how} of {booking.selection_id} at {router.name}")
        elif status == HTTPStatus.NOT_FOUND:
            self._judge_unknown(booking, router)
            # An owner that was cut off reads the request later, and ends the reservation then.
            booking.is_uncertain |= how == "release"
        elif status in (LOST, HTTPStatus.SERVICE_UNAVAILABLE):
            booking.is_uncertain |= how == "release"
            self._end_later(booking, how, END_AGAIN_S)
        else:
            self._laws.broken = f"reservations: {router.name} answers {status} to {how} of {booking.selection_id}"

    def _judge_unknown(self, booking: Booking, router: Router) -> None:
        """Judge the answer that nobody has a reservation."""
        self._note("client", f"nobody has {booking.selection_id}, says {router.name}")
        owner, worker = booking.router, booking.worker
        is_over = booking.releases or booking.is_uncertain or booking.pending
        is_over = is_over or worker is None or booking.lives != self._lives(worker)
        is_known = owner.token == booking.token and owner.answers
        is_known = is_known and self._laws.written.has_published(booking.token, CALM_S)
        if not is_over and is_known and self._loop.time() > self.disturbed_s + CALM_S:
            self._laws.broken = f"reservations: {router.name} does not find {booking.selection_id} of {owner.name}"
        # A client that believes this does not come back, and what is left ends with the next life of the engine that its router
        # sees.
        booking.is_uncertain = True

    def _lives(self, worker: WorkerKey) -> tuple[int, bool, int]:
        engine = self._engines[worker]
        return len(engine.spans), engine.life is None, self._operator.wishes[worker].endings

    @property
    def reserved(self) -> Counter[str]:
        """The known reservations by the token of the process that made them."""
        return Counter(booking.token for booking in self._bookings.values() if booking.worker is not None)

    def end_all(self) -> None:
        """End the reservations that were not released in the faults, each at its own router."""
        for booking in self._bookings.values():
            if not booking.releases and booking.router.token == booking.token:
                self._end(booking, "release", booking.router)
