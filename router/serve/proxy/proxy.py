# SPDX-License-Identifier: Apache-2.0
"""One OpenAI request from its client to an engine, and the answer back: bodies and streams unchanged, byte for byte.

`request_reader.py` reads the request, the `Placer` chooses the worker, and `attempts.py` decides about retries. An
engine's errors go to the client unchanged; the router's own errors say what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

import kvrouter.router.serve.proxy.headers as h
from kvrouter.contract.worker_status import ReuseStatus
from kvrouter.router.base.common.errors import NoWorker, RouterError, Saturated, WorkerSilent, WorkerUnreachable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.random_ids import RandomIds
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.known import engine_named
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import Target
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.model_names import ServedModel
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.route.owners.response_owners import ResponseOwners
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.tokens.proxied_paths import route_of
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.attempt import Attempt, Sent, error_of, named
from kvrouter.router.serve.proxy.attempts import GONE_STATUSES, AttemptsSpent
from kvrouter.router.serve.proxy.downstream import Client
from kvrouter.router.serve.proxy.kv_source import ClientSources, with_source
from kvrouter.router.serve.proxy.kv_transfer_params import can_be_handed_over
from kvrouter.router.serve.proxy.prefill_leg import PrefillLeg, excluding
from kvrouter.router.serve.proxy.proxy_metrics import ProxyMetrics
from kvrouter.router.serve.proxy.refused_requests import FIRST_ERROR, FIRST_SERVER_ERROR
from kvrouter.router.serve.proxy.request_reader import Request, RequestReader, Tokens
from kvrouter.router.serve.proxy.stored_responses import StoredResponses
from kvrouter.router.serve.proxy.worker_addresses import Addresses

log = logging.getLogger("kvrouter.proxy")

EVENT_STREAM = b"text/event-stream"
# The problem of a stream that is complete as HTTP but ends with an engine's error.
ERROR_IN_STREAM = "its stream ends with an error of the engine"


class _Answer:
    """An answer of which the first byte has arrived, and the placement of its request."""

    def __init__(self, placement: Placement, sent: Sent) -> None:
        self.placement = placement
        self.sent = sent
        self.connection = sent.connection
        self.head = sent.head


class Proxy:
    """The proxy of one event loop.

    Call `close` only when no request is in progress.
    """

    def __init__(
        self,
        *,
        placer: Placer,
        tokens: Tokens,
        # Returns the model that a request's `model` means.
        resolve: Callable[[str], ServedModel],
        # Returns the same sequence until a registration changes.
        registrations: Callable[[], Sequence[Registration]],
        # Returns the rank to send with a request to each worker that needs one, as the same object until one changes.
        ranks: Callable[[], Mapping[WorkerKey, int]],
        admission: Admission,
        pool: Pool,
        metrics: ProxyMetrics,
        quality: Quality,
        owners: ResponseOwners,
        allowed: AllowList,
        # The seconds for which an engine may send nothing.
        silence_s: float,
        # The key that engines get in place of the client's Authorization. If it is not set, the client's header is
        # passed on, unless the router has a key of its own.
        engine_key: EngineKey,
        # Whether clients need a key of the router.
        has_own_key: bool,
        # Whether answers name the predicted hit.
        shows_hits: bool = True,
        # Whether clients may name the engine from which another one fetches blocks.
        trusts_sources: bool = False,
    ) -> None:
        """Build the parts of the proxy. Nothing is connected yet."""
        self._placer = placer
        self.reader = RequestReader(
            tokens,
            resolve,
            lambda: sorted(self.addresses().models),
            self._takes_salt,
            self.client_authorization,
            owners,
            ClientSources(metrics.removed_sources, trusted=trusts_sources),
        )
        self._registrations = registrations
        self._ranks = ranks
        self._admission = admission
        self._pool = pool
        self._metrics = metrics
        self._quality = quality
        self.allowed = allowed
        self._sending = Attempt(
            addresses=self.addresses,
            authorization=self.authorization,
            refresh_keys=engine_key.refresh,
            admission=admission,
            pool=pool,
            metrics=metrics,
            silence_s=silence_s,
        )
        self.prefill_leg = PrefillLeg(self._sending, metrics)
        self.responses = StoredResponses(
            owners, self._sending, self.addresses, lambda: placer.takers(sorted(self.addresses().models))
        )
        self._engine_key = engine_key
        self._has_own_key = has_own_key
        self.shows_hits = shows_hits
        self._new_id = RandomIds()
        self._open = 0
        metrics.open.set_function(lambda: self._open)
        metrics.key_withheld.set_function(lambda: len(engine_key.withheld()))
        self._addressed: tuple[Sequence[Registration], Mapping[WorkerKey, int]] | None = None
        self._known_addresses = Addresses((), allowed)

    def _takes_salt(self, model: str, path: str) -> bool:
        """Return whether all engines of a model apply `cache_salt` at this path."""
        return all(path in engine_named(name).salted_paths for name in self.addresses().engines.get(model, ()))

    def apply(self, config: Config) -> None:
        """Apply the changed time limit to requests that are sent from now on."""
        self._sending.silence_s = config.answer_timeout_s

    async def forward(self, client: Client) -> None:
        """Answer the client: place its request, send it to a worker, and pass the worker's answer on.

        Raises nothing but defects and its own cancellation, which means that the client has hung up.
        """
        await self._forward(client, client.path, self._answer_placed)

    async def forward_stored(self, client: Client) -> None:
        """Answer a request about a stored response as its worker does. Raises as `forward` does."""
        await self._forward(client, route_of(client.path), self._answer_stored)

    async def _forward(self, client: Client, route: str, answer: Callable[[Client, Request], Awaitable[str]]) -> None:
        """Answer the client and count the outcome, which `answer` returns. `route` is the path for metrics."""
        request_id = h.header(client.headers, h.REQUEST_ID) or self._new_id().encode()
        key_name = None if client.bounds is None else client.bounds.key or None
        watch = self._quality.begin(route, client.headers, request_id.decode("latin-1"), key_name)
        request = Request(client, watch, request_id)
        outcome, refusal_status = "client_gone", 0
        self._open += 1
        try:
            outcome = await answer(client, request)
        except RouterError as error:
            outcome = "unreachable" if isinstance(error, WorkerUnreachable | WorkerSilent) else "refused"
            refusal_status = error.status
            client.refuse(error, [(h.REQUEST_ID, request.request_id), *_retried(request)])
        except Exception:
            outcome = "bug"
            raise
        finally:
            self._open -= 1
            self._metrics.requests(route, outcome).inc()
            watch.ended(outcome, refusal_status)

    async def _answer_placed(self, client: Client, request: Request) -> str:
        """Place the request, pass the worker's answer on, and return the outcome. Raises RouterError."""
        ask = await self.reader.read(request)
        request.watch.lookup_ended(ask)
        answer = await self._answer(request, ask)
        return await self._relay(client, request, answer, predicted=not ask.question.is_blind)

    async def _answer_stored(self, client: Client, request: Request) -> str:
        """Pass on what the owner of a stored response answers, and return the outcome. Raises RouterError."""
        try:
            worker, status = await self.responses.forward(client, request)
        except Failure:
            return "cut"
        outcome = outcome_of(status, failed=False)
        self._metrics.answers(worker)(outcome).inc()
        return outcome

    def closed(self, worker: WorkerKey) -> str | None:
        """Return why a worker takes no new requests now, or None if it does."""
        return self._admission.problem(worker)

    def health(self) -> list[str]:
        """Return the problems of open breakers, of predictions that do not come true, and of the engine key."""
        return [
            *self._admission.health(),
            *self._quality.health(),
            *self._engine_key.health(),
            *self.responses.owners.health(),
        ]

    def predictions_problem(self, worker: WorkerKey) -> str | None:
        """Return why the predictions for a worker are not to be trusted, or None if nothing speaks against them."""
        return self._quality.problem(worker)

    def reuse(self, worker: WorkerKey) -> ReuseStatus | None:
        """Return the predicted and the delivered reuse of a worker, or None if none of its answers was judged."""
        return self._quality.reuse(worker)

    def close(self) -> None:
        """Close the idle connections to engines."""
        self._pool.close()

    def authorization(self, headers: h.Headers, target: Target) -> bytes | None:
        """Return the Authorization to send to an engine: the engines' key, or else the client's header."""
        key = self._engine_key.header_for(target.origin)
        return self.client_authorization(headers) if key is None else key.encode("ascii")

    def client_authorization(self, headers: h.Headers) -> bytes | None:
        """Return the client's Authorization if it is meant for the engines.

        It is meant for them if the settings have neither a key for engines nor a key of the router.
        """
        if self._engine_key.is_set or self._has_own_key:
            return None
        return h.header(headers, b"authorization")

    async def _answer(self, request: Request, placement_request: PlacementRequest) -> _Answer:
        """Return the first good answer of a worker, after as many attempts as `Attempts` allows.

        If every attempt fails, return the last gateway's answer that its engine is gone, if there is one. Raises
        RouterError.
        """
        # A gateway's answer that its engine is gone. The client gets it if no worker gives a better one.
        spare: _Answer | None = None
        error: RouterError | None = None
        failed: set[WorkerKey] = set()
        if placement_request.question.model in self.addresses().prefillers:
            client_body = request.client_body
            may_hand_over = client_body is not None and can_be_handed_over(request.client.path, client_body)
            placement_request = msgspec.structs.replace(placement_request, may_hand_over=may_hand_over)
        try:
            while True:
                try:
                    placement = await self._place(placement_request)
                except (NoWorker, Saturated):
                    if spare is not None:
                        answer, spare = spare, None
                        return answer
                    if error is not None:
                        # The error of the last engine says more than the absence of another worker.
                        raise error from None
                    raise
                request.placement = placement
                request.watch.placed(placement)
                if spare is not None:
                    spare.connection.close()
                    spare = None
                try:
                    answer = await self._attempt(request, placement_request, placement, failed)
                except AttemptsSpent as spent:
                    raise error_of(spent.failure) from None
                except Failure as caught:
                    failure, error = caught, error_of(caught)
                    if request.former_id is not None:
                        error = self.responses.error_of(caught, request.former_id, placement.worker)
                    if not request.attempts.failed(named(placement.worker), failure):
                        raise error from None
                    failed |= self.addresses().sharing(placement.worker)
                else:
                    status, is_gone = answer.head.status, answer.head.status in GONE_STATUSES
                    handed_over = computed_at(placement) is not None
                    if not (is_gone or (handed_over and status >= FIRST_SERVER_ERROR)):
                        return answer
                    failure = Failure(Kind.GONE, f"the engine answers {status}")
                    self._sending.count(placement.worker, failure)
                    if not request.attempts.failed(named(placement.worker), failure):
                        return answer
                    if handed_over and (placement.prefill is not None or not is_gone):
                        # The sidecar or the blocks could not be reached; the worker can compute the prompt alone.
                        placement_request = msgspec.structs.replace(placement_request, may_hand_over=False)
                    else:
                        failed |= self.addresses().sharing(placement.worker)
                    placement.done()
                    request.watch.failed(failure.kind.value, failure.text)
                    spare = answer
                self._metrics.retries.labels(failure.kind.value).inc()
                placement_request = excluding(placement_request, failed)
        finally:
            if spare is not None:
                spare.connection.close()

    async def _place(self, request: PlacementRequest) -> Placement:
        """Place the request at a worker that has an address to send it to.

        Raises NoWorker if there is none, and the errors of `Placer.place`.
        """
        placement = await self._placer.place(request)
        addresses = self.addresses()
        if placement.worker in addresses.targets:
            return placement
        placement.done()
        if request.pinned is None:
            placement = await self._placer.place(excluding(request, addresses.unreachable))
            if placement.worker in addresses.targets:
                return placement
            placement.done()
        raise NoWorker("no worker can take it: register the engine's HTTP address (url), and let allow_hosts admit it")

    def addresses(self) -> Addresses:
        """Return the addresses of the registered workers. The object stays the same until one of them changes."""
        registrations, ranks = self._registrations(), self._ranks()
        addressed = self._addressed
        if addressed is None or registrations is not addressed[0] or ranks is not addressed[1]:
            self._addressed = registrations, ranks
            self._known_addresses = Addresses(registrations, self.allowed, ranks)
        return self._known_addresses

    async def _attempt(
        self, request: Request, placement_request: PlacementRequest, placement: Placement, failed: set[WorkerKey]
    ) -> _Answer:
        """Send the request to the placement's worker and return the beginning of its answer.

        Raises Failure if the worker does not answer, and AttemptsSpent if the prefill worker failed and no retry is
        left. Ends the placement if it raises.

        Args:
            request: The request of the client.
            placement_request: The placed request, for another prefill worker if the first one fails.
            placement: The worker for the request, and its prefill worker if it has one.
            failed: The workers that failed; prefill workers that fail are added.
        """
        body, added = request.body, h.NOTHING
        try:
            if placement.prefill is not None:
                placement.record()
                given = await self.prefill_leg.hand_over(
                    request, placement_request, placement, self.addresses(), failed
                )
                body, added = given.body, given.headers
            body = sourced_body(request, body, placement)
            sent = await self._sending.send(request, placement.worker, body, request.headers, added)
        except BaseException:
            placement.done()
            raise
        return _Answer(placement, sent)

    async def _relay(self, client: Client, request: Request, answer: _Answer, *, predicted: bool) -> str:
        """Pass the answer on until its end, and return the outcome for the metrics.

        Args:
            client: The client that gets the answer.
            request: The client's request.
            answer: The answer that has begun.
            predicted: Whether the hit of the choice is a prediction; without the prompt's tokens it is not.
        """
        placement, connection, head = answer.placement, answer.connection, answer.head
        added = [
            (h.WORKER, named(placement.worker).encode()),
            (h.SELECTION_ID, placement.selection_id.encode()),
            *_retried(request),
        ]
        if predicted and self.shows_hits:
            added.append((h.PREDICTED_HIT, b"%d" % placement.predicted_tokens))
        if (prefiller := computed_at(placement)) is not None:
            added.append((h.PREFILL_WORKER, named(prefiller).encode()))
            request.watch.handed_over()
        streams = is_event_stream(head.headers)
        if streams:
            # The first byte of any other answer comes with its last token.
            placement.first_token()
        watch = request.watch
        tap = watch.tap(client.send, head.status, head.headers, streams=streams)
        made = self.responses.follow(request, placement.worker, tap, head.status)
        try:
            client.begin(head, h.answer_headers(head.headers, added, request.request_id), connection)
            await connection.relay(tap)
            client.finish()
        except Failure as failure:
            client.break_off()
            self._sending.break_off(placement.worker, answer.sent, failure)
            return "cut"
        except BaseException:
            self._sending.give_up(answer.sent)
            raise
        finally:
            placement.done(watch.output_tokens())
            if made is not None:
                made.ended(watch)
        if tap.failed:
            answer.sent.exchange.spoiled(ERROR_IN_STREAM)
        self._sending.give_back(answer.sent)
        outcome = outcome_of(head.status, failed=tap.failed)
        self._metrics.answers(placement.worker)(outcome).inc()
        if log.isEnabledFor(logging.DEBUG):
            extra = {"path": client.path, "worker": placement.worker, "status": head.status}
            log.debug("proxied", extra=extra | {"trail": request.attempts.trail} | watch.report().fields())
        return outcome


def computed_at(placement: Placement) -> WorkerKey | None:
    """Return the prefill worker of the placement, or None if one worker does both."""
    return placement.prefilled_at if placement.prefill is None else placement.prefill.worker


def sourced_body(request: Request, body: bytes, placement: Placement) -> bytes:
    """Return the body for the placement's worker with the source of its pull, if it has one, and report that to the watch."""
    pull, client_body = placement.pull, request.client_body
    if pull is None:
        return body
    assert client_body is not None
    request.watch.pulling(pull)
    return with_source(body, client_body.fields, pull.source_params(placement.selection_id))


def outcome_of(status: int, *, failed: bool) -> str:
    """Return the outcome of a complete answer with this status.

    Args:
        status: The HTTP status.
        failed: Whether the answer's stream reports a failure of the engine.
    """
    if failed or status >= FIRST_SERVER_ERROR:
        return "server_error"
    return "client_error" if status >= FIRST_ERROR else "ok"


def is_event_stream(headers: h.Headers) -> bool:
    """Return whether an answer with these headers is a stream of server-sent events."""
    kind = h.header(headers, b"content-type")
    return kind is not None and kind.startswith(EVENT_STREAM)


def _retried(request: Request) -> h.Headers:
    """Return the header that names the failed attempts, or no header if there were none."""
    trail = request.attempts.trail
    return [(h.RETRIED, ", ".join(trail).encode())] if trail else []
