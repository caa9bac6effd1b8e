# SPDX-License-Identifier: Apache-2.0
"""The observer of a request that has its endpoint. Synchronous, for one event loop.

It follows the answer, and updates the load, the judged predictions and the worker's breaker as the proxy does.
"""

from __future__ import annotations

from collections.abc import Callable

import kvrouter.router.serve.proxy.headers as h
from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.quality.answer_tap import AnswerTap
from kvrouter.router.observe.quality.request_watch import CLIENT_GONE
from kvrouter.router.route.placement.placement_request import Placement
from kvrouter.router.serve.gateway.endpoints import Destination, Endpoints, canonical
from kvrouter.router.serve.gateway.gateway_metrics import GatewayMetrics
from kvrouter.router.serve.gateway.process_stream import GatewayRequest
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.attempt import named
from kvrouter.router.serve.proxy.proxy import ERROR_IN_STREAM, computed_at, is_event_stream, outcome_of
from kvrouter.router.serve.proxy.request_reader import Request
from kvrouter.router.serve.proxy.stored_responses import MadeResponse, StoredResponses

SERVED_ELSEWHERE = "the gateway had its request served by another endpoint"
NOT_SENT = "elsewhere"


def _nowhere(parts: list[bytes]) -> None:
    """Drop the bytes, because the gateway passes the answer on."""


class PickedRequest:
    """The observer of one request's answer. It ends by one call of `ends` or `close`."""

    def __init__(
        self,
        request: Request,
        placement: Placement,
        where: Destination,
        endpoints: Callable[[], Endpoints],
        admission: Admission,
        metrics: GatewayMetrics,
        responses: StoredResponses,
        *,
        predicted: bool,
    ) -> None:
        self._request = request
        self._placement = placement
        self._where = where
        self._endpoints = endpoints
        self._admission = admission
        self._exchange = admission.begun(placement.worker, request.caller)
        self._metrics = metrics
        self._responses = responses
        # The response that the answer makes, or None if the engine keeps none.
        self._made: MadeResponse | None = None
        # Whether the hit of the choice is a prediction; without the prompt's tokens it is not.
        self._predicted = predicted
        self._tap: AnswerTap | None = None
        self._status = 0
        self._streams = False

    def begins(self, status: int, headers: h.Headers, served: str | None) -> h.Headers:
        """Note the headers of the answer, and return headers to set in it, in place of those of the same name.

        `served` is the endpoint that answers, or None if the gateway does not name it.
        """
        placement, watch = self._placement, self._request.watch
        if served is not None:
            self._served(served)
        self._exchange.answered(status)
        added = [
            (h.WORKER, named(placement.worker).encode()),
            (h.SELECTION_ID, placement.selection_id.encode()),
            (h.REQUEST_ID, self._request.request_id),
        ]
        if self._predicted:
            added.append((h.PREDICTED_HIT, b"%d" % placement.predicted_tokens))
        if (prefiller := computed_at(placement)) is not None:
            added.append((h.PREFILL_WORKER, named(prefiller).encode()))
            watch.handed_over()
        self._status, self._streams = status, is_event_stream(headers)
        self._tap = watch.tap(_nowhere, status, headers, streams=self._streams)
        self._made = self._responses.follow(self._request, placement.worker, self._tap, status)
        return added

    def takes(self, data: bytes) -> None:
        """Note the next bytes of the answer's body."""
        if self._streams:
            # The first byte of any other answer comes with its last token.
            self._placement.first_token()
        if self._tap is not None:
            self._tap([data])

    def ends(self) -> None:
        """Note that the answer is complete."""
        failed = self._tap is not None and self._tap.failed
        if failed:
            self._exchange.spoiled(ERROR_IN_STREAM)
        else:
            self._exchange.ended()
        self._end(outcome_of(self._status, failed=failed))

    def close(self) -> None:
        """Note that the answer stays incomplete.

        The client may have hung up, or the engine or the gateway may have broken off; these look alike from here.
        """
        self._exchange.unknown()
        self._end(CLIENT_GONE)

    def _end(self, outcome: str) -> None:
        """End the placement, and count the outcome."""
        watch = self._request.watch
        self._placement.done(watch.output_tokens())
        if self._made is not None:
            self._made.ended(watch)
        self._metrics.requests(self._request.client.path, outcome).inc()
        watch.ended(outcome)

    def _served(self, endpoint: str) -> None:
        """Move the load and the judgement to the worker behind this endpoint if it is not the picked one."""
        endpoint = canonical(endpoint) or endpoint
        destination, placement, watch = self._where, self._placement, self._request.watch
        if endpoint == destination.endpoints[0]:
            return
        worker = placement.worker
        if endpoint in destination.endpoints:
            # The gateway used one of the fallbacks.
            hit = destination.hits[destination.endpoints.index(endpoint)]
            self._exchange.failed(SERVED_ELSEWHERE)
            if placement.pull is not None:
                # The fallback got the same source, so it reuses more than its hit.
                self._predicted = False
                watch.handed_over()
        else:
            others = self._endpoints().at(endpoint, worker.model)
            if not others:
                return
            # The hit of this worker is not known, because the choice did not compare it.
            self._predicted = False
            hit = _unknown_hit(min(others))
            watch.handed_over()
            self._exchange.unknown()
        self._metrics.served_elsewhere(worker).inc()
        watch.failed(NOT_SENT, SERVED_ELSEWHERE)
        placement.served_by(hit)
        host, _, port = endpoint.rpartition(":")
        watch.sending(hit.worker, host, int(port), [])
        self._exchange = self._admission.begun(hit.worker, self._request.caller)


class PickedResponse:
    """The observer of the answer to a request about a stored response."""

    def __init__(self, responses: StoredResponses, gateway_request: GatewayRequest, worker: WorkerKey) -> None:
        self._responses = responses
        self._gateway_request = gateway_request
        self._worker = worker

    def begins(self, status: int, headers: h.Headers, served: str | None) -> h.Headers:
        """Note the headers of the answer, and return headers to set in it, in place of those of the same name."""
        self._responses.answered(self._gateway_request, self._gateway_request.method.decode("latin-1"), status)
        return [(h.WORKER, named(self._worker).encode())]

    def takes(self, data: bytes) -> None:
        """Do nothing with the answer's body."""

    def ends(self) -> None:
        """Do nothing at the end, because nothing is counted for it."""

    def close(self) -> None:
        """Do nothing at an early end, because nothing is counted for it."""


def _unknown_hit(worker: WorkerKey) -> Hit:
    return Hit(worker, all_on_gpu(0), StreamState.LIVE.value)
