# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker: it finds the worker for one request of a gateway.

A request is read, placed and handed over with the proxy's own parts: the same reader, the same choice, the same load.
Everything belongs to one event loop.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable

import msgspec

import kvrouter.router.serve.proxy.headers as h
from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.base.common.errors import (
    RATE_LIMIT,
    CutBody,
    Forbidden,
    NoWorker,
    RouterError,
    Saturated,
    SettingError,
)
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import bracketed
from kvrouter.router.observe.quality.request_watch import CLIENT_GONE, Quality
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.client_body import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH
from kvrouter.router.route.tokens.proxied_paths import PATHS, STORED_PATHS, stored_path
from kvrouter.router.serve.access.tenants import Tenants
from kvrouter.router.serve.gateway.endpoints import UNUSABLE, Destination, Endpoints, destination
from kvrouter.router.serve.gateway.gateway_metrics import GatewayMetrics
from kvrouter.router.serve.gateway.messages import ENDPOINT
from kvrouter.router.serve.gateway.picked_request import PickedRequest, PickedResponse
from kvrouter.router.serve.gateway.process_stream import GatewayRequest, Route
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.attempt import error_of
from kvrouter.router.serve.proxy.attempts import AttemptsSpent
from kvrouter.router.serve.proxy.body_decoding import BodyDecoding
from kvrouter.router.serve.proxy.kv_transfer_params import can_be_handed_over
from kvrouter.router.serve.proxy.prefill_leg import Given, excluding
from kvrouter.router.serve.proxy.proxy import Proxy, sourced_body
from kvrouter.router.serve.proxy.request_reader import Request
from kvrouter.router.serve.proxy.worker_addresses import Addresses

# The number of workers that one error names, and of characters that it shows of a path.
NAMES_SHOWN = 8
SHOWN_CHARS = 80
POST, UPGRADE = b"POST", b"upgrade"
# The methods with which no engine computes a prompt, unless the connection becomes a websocket. SGLang computes prompts for
# PUT, too: 0.5.23 srt/entrypoints/http_server.py (/generate, /v1/rerank).
READING = frozenset({b"GET", b"HEAD", b"OPTIONS"})
OTHER_PATH = "other"
# The paths that gateways translate into each other.
TRANSLATABLE = frozenset({CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH})
ENDPOINT_HEADER = ENDPOINT.encode()
# Only the router may name a prefill worker, because a sidecar connects wherever these headers point.
PREFILL_HEADERS = (h.PREFILLER, h.PREFILLER_URL)


class Shed(RouterError):
    """The error, with status 429, that every possible worker has too much to do.

    The proxy answers 503 in this case; the extension wants 429 for requests that are shed.
    """

    status = 429
    type = RATE_LIMIT
    default_code = Saturated.default_code


class Picker:
    """The endpoint picker of the Gateway API Inference Extension, which chooses a worker for a gateway's request."""

    def __init__(
        self,
        *,
        proxy: Proxy,
        placer: Placer,
        admission: Admission,
        quality: Quality,
        metrics: GatewayMetrics,
        decoding: BodyDecoding,
        # Returns the registered models.
        models: Callable[[], list[str]],
        # The number of endpoints to name after the picked one.
        fallbacks: int,
        # The paths whose requests the gateway translates after the pick.
        translated: frozenset[str],
        # Returns the rule that finds the tenant of a request, or None if the router makes no cache salts.
        tenants: Callable[[], Tenants | None],
        # Returns monotonic seconds.
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._proxy = proxy
        self._placer = placer
        self._admission = admission
        self._quality = quality
        self._metrics = metrics
        self._decoding = decoding
        self._models = models
        self._fallbacks = fallbacks
        self._translated = translated
        self._tenants = tenants
        self._clock = clock
        self._rng = rng
        self._addresses: Addresses | None = None
        self._known_endpoints = Endpoints(Addresses((), proxy.allowed))

    async def pick(self, gateway_request: GatewayRequest) -> Route:
        """Return the route of a request, and reserve a place for it.

        Raises RouterError, with nothing reserved. A CutBody of a request that may go on is not counted.
        """
        began_s = self._clock()
        tenants = self._tenants()
        if tenants is not None:
            # The protocol has no API key: the gateway that may connect is trusted to name the tenant.
            try:
                gateway_request.bounds = tenants.bounds_of(tenants.keyless, gateway_request.headers)
            except RouterError:
                self._metrics.requests(
                    gateway_request.path if gateway_request.path in PATHS else OTHER_PATH, "refused"
                ).inc()
                raise
        stored = stored_path(gateway_request.path)
        if stored is not None and gateway_request.method.decode("latin-1") in STORED_PATHS[stored[0]]:
            return await self._route_stored(gateway_request, stored[0])
        if gateway_request.method != POST or gateway_request.path not in PATHS:
            if tenants is not None and _may_compute(gateway_request):
                self._metrics.requests(OTHER_PATH, "refused").inc()
                raise Forbidden(
                    f"this router makes the cache salts, and reads no prompts at "
                    f"{printable(gateway_request.path[:SHOWN_CHARS])}, so tenants might share a cache there: send the "
                    "request by POST to a path that docs/reference/proxy.md lists",
                    code="salt_not_allowed",
                )
            return self._pass(gateway_request)
        request_id = h.header(gateway_request.headers, h.REQUEST_ID) or secrets.token_hex(16).encode()
        watch = self._quality.begin(gateway_request.path, gateway_request.headers, request_id.decode("latin-1"))
        request = Request(gateway_request, watch, request_id)
        outcome, refusal_status = CLIENT_GONE, 0
        codings: list[str] = []
        try:
            if gateway_request.encoding:
                gateway_request.body = request.body = await self._decoding.decode(
                    gateway_request.encoding, gateway_request.body, codings
                )
                gateway_request.headers = request.headers = h.decoded(gateway_request.headers)
            ask = await self._proxy.reader.read(request)
            if gateway_request.path in self._translated:
                question = msgspec.structs.replace(ask.question, is_guess=True)
                ask = msgspec.structs.replace(ask, question=question)
            watch.lookup_ended(ask)
            route = await self._route(request, ask, gateway_request.subset)
            if gateway_request.encoding:
                # The gateway has the encoded body, which engines do not decode.
                route.body = request.body if route.body is None else route.body
                route.removed = (*route.removed, h.CONTENT_ENCODING)
        except RouterError as error:
            outcome, refusal_status = "refused", error.status
            if isinstance(error, CutBody) and gateway_request.may_go_on:
                # The request comes again with more of its body, and counts then.
                outcome = ""
                codings.clear()
                raise
            if isinstance(error, Saturated):
                raise Shed(error.message, retry_after_s=error.retry_after_s) from None
            raise
        except Exception:
            outcome = "bug"
            raise
        else:
            outcome = ""
        finally:
            self._decoding.count(codings)
            if outcome:
                self._metrics.requests(gateway_request.path, outcome).inc()
                watch.ended(outcome, refusal_status)
        self._metrics.pick_seconds.observe(self._clock() - began_s)
        return route

    def _endpoints(self) -> Endpoints:
        """Return the endpoints of the registered workers. The object stays the same until a registration changes."""
        addresses = self._proxy.addresses()
        if addresses is not self._addresses:
            self._addresses = addresses
            self._known_endpoints = Endpoints(addresses)
        return self._known_endpoints

    def _pass(self, request: GatewayRequest) -> Route:
        """Return a route to any worker that takes requests, for a request without a prompt. Raises NoWorker."""
        outside, endpoints = self._endpoints().outside(request.subset), self._endpoints()
        usable = endpoints.of.keys() - outside
        takers = [worker for worker in self._placer.takers(self._models()) if worker in usable]
        if not takers:
            raise _nobody(None, endpoints, request.subset)
        self._metrics.requests(OTHER_PATH, "passed").inc()
        endpoint = endpoints.of[self._rng.choice(takers)]
        return Route(endpoint, [(ENDPOINT_HEADER, endpoint.encode())], _removed(request.headers, []))

    async def _route_stored(self, gateway_request: GatewayRequest, template: str) -> Route:
        """Return the route of a request about a stored response to its worker. Raises RouterError."""
        outcome = "refused"
        try:
            worker = await self._proxy.responses.worker_of(gateway_request)
            addresses, endpoints = self._proxy.addresses(), self._endpoints()
            if worker not in endpoints.of or worker in endpoints.outside(gateway_request.subset):
                raise _nobody(worker.model, endpoints, gateway_request.subset)
            outcome = "passed"
        finally:
            self._metrics.requests(template, outcome).inc()
        endpoint = endpoints.of[worker]
        headers = [(ENDPOINT_HEADER, endpoint.encode())]
        if (rank := addresses.ranks.get(worker)) is not None:
            headers.append((h.DP_RANK, b"%d" % rank))
        authorization = self._proxy.authorization(gateway_request.headers, addresses.targets[worker])
        if authorization is not None:
            headers.append((b"authorization", authorization))
        observer = PickedResponse(self._proxy.responses, gateway_request, worker)
        return Route(endpoint, headers, _removed(gateway_request.headers, headers), observer=observer)

    async def _route(
        self, request: Request, placement_request: PlacementRequest, subset: tuple[str, ...] | None
    ) -> Route:
        """Place the request, have its prompt computed elsewhere if needed, and return its route. Raises RouterError."""
        question, client_body = placement_request.question, request.client_body
        may_hand_over = (
            question.model in self._proxy.addresses().prefillers
            # A translated body need not keep the fields that hand a prompt over.
            and not question.is_guess
            and client_body is not None
            and can_be_handed_over(request.client.path, client_body)
        )
        placement_request = msgspec.structs.replace(
            placement_request,
            # An engine reads the source from the body alone.
            may_pull=placement_request.may_pull and not question.is_guess,
            keeps_comparison=self._fallbacks > 0 and placement_request.pinned is None,
            may_hand_over=may_hand_over,
        )
        placement = await self._place(placement_request, subset)
        # The addresses may have changed while the request waited in line.
        addresses, endpoints = self._proxy.addresses(), self._endpoints()
        try:
            request.watch.placed(placement)
            destination = self._destination(placement, endpoints, addresses)
            given = Given(request.body, h.NOTHING)
            if placement.prefill is not None:
                # `directly` is needed because gRPC's tasks are plain asyncio tasks.
                given = await directly(
                    self._proxy.prefill_leg.hand_over(request, placement_request, placement, addresses, set())
                )
            return self._sent(request, placement_request, placement, destination, given, addresses)
        except AttemptsSpent as spent:
            placement.done()
            raise error_of(spent.failure) from None
        except BaseException:
            placement.done()
            raise

    async def _place(self, request: PlacementRequest, subset: tuple[str, ...] | None) -> Placement:
        """Place the request at a worker that the gateway can reach and that `subset` allows. Raises RouterError."""
        for _ in range(2):
            outside = self._endpoints().outside(subset)
            try:
                placement = await self._placer.place(excluding(request, outside) if outside else request)
                placement.record()
            except NoWorker:
                model, usable = request.question.model, self._endpoints().of.keys()
                if outside and not any(worker.model == model for worker in usable - outside):
                    break
                raise
            if placement.worker in self._endpoints().of and placement.worker not in self._endpoints().outside(subset):
                return placement
            # The worker was registered while the request waited.
            placement.done()
        raise _nobody(request.question.model, self._endpoints(), subset)

    def _destination(self, placement: Placement, endpoints: Endpoints, addresses: Addresses) -> Destination:
        """Return the endpoints of the placement's worker and of its fallbacks, the cheapest first."""
        comparison = placement.choice.comparison
        others = []
        if comparison is not None:
            # A few more than needed, because some may be behind the same endpoint.
            others = [comparison.hits[index] for index in comparison.best(1 + 2 * self._fallbacks)[1:]]
            if (pull := placement.pull) is not None:
                # All endpoints get the same request, and no engine can fetch from itself.
                others = [hit for hit in others if hit.worker != pull.source]
            placement.choice = placement.choice.alone()
        return destination(placement.choice.hit, others, endpoints, addresses, self._fallbacks)

    def _sent(
        self,
        request: Request,
        placement_request: PlacementRequest,
        placement: Placement,
        destination: Destination,
        given: Given,
        addresses: Addresses,
    ) -> Route:
        """Return the route of a placed request: its endpoint, its headers, and the observer of its answer."""
        client, worker = request.client, placement.worker
        target = addresses.targets[worker]
        headers = [(ENDPOINT_HEADER, destination.text.encode()), (h.REQUEST_ID, request.request_id), *given.headers]
        if (rank := addresses.ranks.get(worker)) is not None:
            headers.append((h.DP_RANK, b"%d" % rank))
        authorization = self._proxy.authorization(client.headers, target)
        if authorization is not None:
            headers.append((b"authorization", authorization))
        sent = request.watch.sending(worker, target.host, target.port, request.headers)
        if sent is not client.headers:
            headers += [header for header in sent if header not in client.headers]
        body: bytes | None = given.body
        if (pull := placement.pull) is not None:
            body = sourced_body(request, given.body, placement)
            headers.append((h.KV_SOURCE, h.named_in_header(f"{bracketed(pull.host)}:{pull.port}").encode()))
        elif body is client.body:
            body = None
        question = placement_request.question
        predicted = not question.is_blind and not question.is_guess and self._proxy.shows_hits
        observer = PickedRequest(
            request,
            placement,
            destination,
            self._endpoints,
            self._admission,
            self._metrics,
            self._proxy.responses,
            predicted=predicted,
        )
        return Route(destination.text, headers, _removed(client.headers, headers), body, observer)


def translated_paths(paths: Iterable[str]) -> frozenset[str]:
    """Return the paths of the setting gateway_translated_paths. Raises SettingError."""
    if unknown := sorted(set(paths) - TRANSLATABLE):
        raise SettingError(
            f"gateway_translated_paths has {unknown[0]!r}; name paths that gateways translate: {', '.join(sorted(TRANSLATABLE))}"
        )
    return frozenset(paths)


def _may_compute(request: GatewayRequest) -> bool:
    """Return whether an engine may compute a prompt for a request that the router does not know."""
    return request.method not in READING or h.header(request.headers, UPGRADE) is not None


def _removed(headers: h.Headers, given: h.Headers) -> tuple[bytes, ...]:
    """Return the names of the client's headers that must not reach an engine, except those that the router sets."""
    set_here = {name for name, _ in given}
    names = {name for name, _ in headers if name in PREFILL_HEADERS or name.startswith(b"x-kvrouter-")}
    return tuple(names - set_here)


def _nobody(model: str | None, endpoints: Endpoints, subset: tuple[str, ...] | None) -> NoWorker:
    """Return the error that no worker can take the request."""
    subject = "no worker" if model is None else f"no worker of model {model!r}"
    if subset is not None:
        return NoWorker(f"{subject} is among the {len(subset)} endpoints that the gateway allows")
    unusable = _names(endpoints.unusable)
    return NoWorker(
        f"{subject} has an address that a gateway can be given ({unusable or 'none is registered'}): {UNUSABLE}"
    )


def _names(workers: frozenset[WorkerKey]) -> str:
    return ", ".join(sorted(printable(worker.route_name) for worker in workers)[:NAMES_SHOWN])
