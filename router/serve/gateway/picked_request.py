# SPDX-License-Identifier: Apache-2.0
"""One request that has its endpoint: its answer is followed, and what is known of load, predictions and the worker's
breaker goes by it, as in the proxy. Synchronous, for one loop."""

from __future__ import annotations

from collections.abc import Callable

import kvrouter.router.serve.proxy.headers as h
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.quality.answer_tap import AnswerTap
from kvrouter.router.observe.quality.request_watch import CLIENT_GONE
from kvrouter.router.route.placement.placement_request import Placement
from kvrouter.router.serve.gateway.endpoints import Destination, Endpoints, canonical
from kvrouter.router.serve.gateway.gateway_metrics import GatewayMetrics
from kvrouter.router.serve.proxy.admission import Admission
from kvrouter.router.serve.proxy.attempt import named
from kvrouter.router.serve.proxy.proxy import ERROR_IN_STREAM, computed_at, is_event_stream, outcome_of
from kvrouter.router.serve.proxy.request_reader import Request

SERVED_ELSEWHERE = "the gateway had its request served by another endpoint"
NOT_SENT = "elsewhere"


def _nowhere(parts: list[bytes]) -> None:
    """The gateway passes the answer on."""


class PickedRequest:
    """Ended by `ends` or by `close`, once. predicted: whether the hit of the choice is a prediction."""

    def __init__(
        self,
        request: Request,
        placement: Placement,
        where: Destination,
        endpoints: Callable[[], Endpoints],
        admission: Admission,
        metrics: GatewayMetrics,
        *,
        predicted: bool,
    ) -> None:
        self._request = request
        self._placement = placement
        self._where = where
        self._endpoints = endpoints
        self._admission = admission
        self._exchange = admission.begun(placement.worker)
        self._metrics = metrics
        self._predicted = predicted
        self._tap: AnswerTap | None = None
        self._status = 0
        self._streams = False

    def begins(self, status: int, headers: h.Headers, served: str | None) -> h.Headers:
        """See `process_stream.Observer`."""
        placement, watch = self._placement, self._request.watch
        if served is not None:
            self._served(served)
        self._exchange.answered(status)
        given = [
            (h.WORKER, named(placement.worker).encode()),
            (h.SELECTION_ID, placement.selection_id.encode()),
            (h.REQUEST_ID, self._request.request_id),
        ]
        if self._predicted:
            given.append((h.PREDICTED_HIT, b"%d" % placement.predicted_tokens))
        if (prefiller := computed_at(placement)) is not None:
            given.append((h.PREFILL_WORKER, named(prefiller).encode()))
            watch.handed_over()
        self._status, self._streams = status, is_event_stream(headers)
        self._tap = watch.tap(_nowhere, status, headers, streams=self._streams)
        return given

    def takes(self, data: bytes) -> None:
        """See `process_stream.Observer`."""
        if self._streams:
            # The first byte of any other answer comes with its last token.
            self._placement.first_token()
        if self._tap is not None:
            self._tap([data])

    def ends(self) -> None:
        """See `process_stream.Observer`."""
        failed = self._tap is not None and self._tap.failed
        if failed:
            self._exchange.spoiled(ERROR_IN_STREAM)
        else:
            self._exchange.ended()
        self._end(outcome_of(self._status, failed=failed))

    def close(self) -> None:
        """See `process_stream.Observer`. The client hung up, or the engine or the gateway broke off: these look alike
        from here."""
        self._exchange.unknown()
        self._end(CLIENT_GONE)

    def _end(self, outcome: str) -> None:
        watch = self._request.watch
        self._placement.done(watch.output_tokens())
        self._metrics.requests(self._request.client.path, outcome).inc()
        watch.ended(outcome)

    def _served(self, endpoint: str) -> None:
        """The gateway says who serves it."""
        endpoint = canonical(endpoint) or endpoint
        where, placement, watch = self._where, self._placement, self._request.watch
        if endpoint == where.endpoints[0]:
            return
        worker = placement.worker
        if endpoint in where.endpoints:
            # The gateway went down the list.
            hit = where.hits[where.endpoints.index(endpoint)]
            self._exchange.failed(SERVED_ELSEWHERE)
        else:
            others = self._endpoints().at(endpoint, worker.model)
            if not others:
                return
            # Nobody knows what it holds of the prompt.
            self._predicted = False
            hit = _unknown_hit(min(others))
            watch.handed_over()
            self._exchange.unknown()
        self._metrics.served_elsewhere(worker).inc()
        watch.failed(NOT_SENT, SERVED_ELSEWHERE)
        placement.served_by(hit)
        host, _, port = endpoint.rpartition(":")
        watch.sending(hit.worker, host, int(port), [])
        self._exchange = self._admission.begun(hit.worker)


def _unknown_hit(worker: WorkerKey) -> Hit:
    return Hit(worker, 0, 0, 0, StreamState.LIVE.value)
