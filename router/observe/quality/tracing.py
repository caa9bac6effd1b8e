# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces of requests.

A request has one span for itself, its tokens, its wait, its choice and each attempt at an engine. Only this module
imports the SDK (extra `otel`); it is imported if `otlp_endpoint` is set. Spans are made with the times that the proxy
measures anyway, and passed to a thread of the SDK that exports them. If it cannot keep up, spans are dropped and
counted, and no request waits. W3C context (`traceparent`, `tracestate`) is taken from the client and passed on to the
engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.tally import Counter
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.model.config.settings import without_password
from kvrouter.router.observe.quality.reuse_report import ReuseReport
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.tokens.proxied_paths import PROXIED

log = logging.getLogger("kvrouter.quality")

# The path at which collectors accept traces over HTTP, below the address that is usually given. Source: OTLP 1.x
# specification.
TRACES_PATH = "/v1/traces"
# Some seconds of a busy router (1,000 requests/s with six spans), some ten MB; a longer outage of the collector loses
# spans.
QUEUE_SPANS = 16_384
# The time limit of the last export: as long as a collector that answers needs. One that does not answer must not delay
# the end.
CLOSE_S = 3.0
CLOSE_LOOK_S = 0.02
SERVICE = "kvrouter"
NS = 1_000_000_000
# The limit of text from elsewhere (an engine's error, a reason) in an attribute.
MAX_TEXT_CHARS = 1_024

TRACE_HEADERS = (b"traceparent", b"tracestate")

Attributes = dict[str, Any]
Headers = list[tuple[bytes, bytes]]


def traces_url(endpoint: str) -> str:
    """Return the address of the setting, with the path of traces appended if it lacks it."""
    return endpoint if endpoint.rstrip("/").endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH


class _Exporter(SpanExporter):
    """An exporter that counts exported and failed spans. It logs one line when failures begin and one when they end.

    It runs in the SDK's thread.
    """

    def __init__(self, inner: Any, spans: Counter, endpoint: str) -> None:
        self._inner = inner
        self._exported = spans.labels("exported")
        self._failed = spans.labels("failed")
        self._endpoint = endpoint
        self._fails = False
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans and count the result."""
        self.taken += len(spans)
        result: SpanExportResult
        try:
            result, why = self._inner.export(spans), ""
        except Exception as error:
            result, why = SpanExportResult.FAILURE, repr(error)
        fails = result is not SpanExportResult.SUCCESS
        (self._failed if fails else self._exported).inc(len(spans))
        if fails and not self._fails:
            log.warning(
                "traces are lost: the collector does not take them; check otlp_endpoint and that it speaks OTLP over HTTP",
                extra={"endpoint": self._endpoint, "error": why or "no success"},
            )
        elif self._fails and not fails:
            log.info("traces are exported again", extra={"endpoint": self._endpoint})
        self._fails = fails
        return result

    def shutdown(self) -> None:
        """Shut down the SDK's exporter."""
        self._inner.shutdown()


class _Processor(SpanProcessor):
    """A processor that passes spans to the SDK's own one as long as that has room, and counts the others as dropped."""

    def __init__(self, exporter: _Exporter, spans: Counter) -> None:
        self._exporter = exporter
        # The SDK's methods of shutdown have no types.
        self._inner: Any = BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS)
        self._dropped = spans.labels("dropped")
        self._given = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Pass on a span that is sampled, unless the queue is full."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._given - self._exporter.taken >= QUEUE_SPANS:
            self._dropped.inc()
            return
        self._given += 1
        self._inner.on_end(span)

    def shutdown(self) -> None:
        """Shut down the SDK's processor."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export the queued spans; return whether that succeeded in time."""
        return bool(self._inner.force_flush(timeout_millis))


class Tracing:
    """The tracing of one process. Call `close` at the end.

    The SDK's own variables (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS ...) apply as usual.
    """

    def __init__(self, endpoint: str, spans: Counter) -> None:
        """Set up the export to `endpoint`. `spans` counts the spans by outcome."""
        url = traces_url(endpoint)
        for outcome in ("exported", "failed", "dropped"):
            spans.labels(outcome)
        self._sender: Any = OTLPSpanExporter(endpoint=url)
        exporter = _Exporter(self._sender, spans, without_password(endpoint))
        resource = Resource.create({"service.version": VERSION})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        # `close` ends the provider within its time limit, rather than the interpreter at its end.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_Processor(exporter, spans))
        self.tracer = self._provider.get_tracer("kvrouter.router", VERSION)
        self.propagator = TraceContextTextMapPropagator()

    def request(self, path: str, headers: Headers, now: float, request_id: str = "") -> RequestTrace:
        """Begin the trace of a request that arrived at `now`, under the client's span if the headers name one."""
        return RequestTrace(self, path, headers, now, request_id)

    async def close(self) -> None:
        """Export the remaining spans within CLOSE_S."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True, name="traces-end")
        thread.start()
        deadline_s = time.monotonic() + CLOSE_S
        while thread.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(CLOSE_LOOK_S)
        if thread.is_alive():
            # End the attempts to reach a collector that does not answer.
            self._sender.shutdown()


class RequestTrace:
    """The spans of one request. Times are seconds of the proxy's clock.

    The first report begins the request's span, with the time at which the request arrived, and `ended` or `answered`
    ends it. So a request that turns out to be only the beginning of a longer one leaves no open span.
    """

    def __init__(self, tracing: Tracing, path: str, headers: Headers, now: float, request_id: str = "") -> None:
        self._tracing = tracing
        self._path = path
        self._headers = headers
        self._request_id = request_id
        # Spans have wall-clock times, unlike the proxy's clock.
        self._offset_ns = time.time_ns() - int(now * NS)
        self._began_s = self._step_s = now
        self._attempt: Span | None = None
        self._attempts = 0

    @cached_property
    def _span(self) -> Span:
        """The span of the request."""
        path, tracing = self._path, self._tracing
        attributes: Attributes = {"http.request.method": "POST", "http.route": path, "url.path": path}
        if self._request_id:
            attributes["kvrouter.request_id"] = self._request_id
        proxied = PROXIED.get(path)
        if proxied is not None and proxied.operation is not None:
            # Source: OpenTelemetry semantic conventions for generative AI.
            attributes["gen_ai.operation.name"] = proxied.operation
        return tracing.tracer.start_span(
            f"POST {path}",
            context=tracing.propagator.extract(_carrier(self._headers), Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=self._ns(self._began_s),
        )

    @cached_property
    def _context(self) -> Context:
        """The context of the request's other spans."""
        return set_span_in_context(self._span, Context())

    def _ns(self, at: float) -> int:
        return int(at * NS) + self._offset_ns

    def _child(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        span = self._tracing.tracer.start_span(
            name, context=self._context, attributes=attributes, start_time=self._ns(began_s)
        )
        span.end(self._ns(ended_s))

    def lookup_ended(self, request: PlacementRequest, now: float) -> None:
        """Record that the model is resolved and the lookup of the prompt's tokens has ended, with or without tokens."""
        question = request.question
        self._span.set_attribute("gen_ai.request.model", question.model)
        if request.max_tokens is not None:
            self._span.set_attribute("gen_ai.request.max_tokens", request.max_tokens)
        attributes = {
            "kvrouter.prompt_tokens": question.num_tokens,
            "kvrouter.known_tokens": question.known_tokens or 0,
            "kvrouter.prompts": question.num_prompts,
        }
        self._child("tokens", self._step_s, now, attributes)
        self._step_s = now

    def placed(self, placement: Placement, now: float) -> None:
        """Record the choice, and the wait for a worker before it.

        The choice began at `placement.placed_s`; the time before that was the wait.
        """
        chosen_s = min(max(placement.placed_s, self._step_s), now)
        if placement.queued_s > 0:
            self._child("queue", self._step_s, chosen_s, {"kvrouter.queued_s": placement.queued_s})
        choice, worker = placement.choice, placement.worker
        attributes: Attributes = {
            "gen_ai.request.model": worker.model,
            "kvrouter.worker": worker.route_name,
            "kvrouter.selection_id": placement.selection_id,
            "kvrouter.predicted_tokens": choice.hit.tokens,
            "kvrouter.predicted_gpu_tokens": choice.hit.on_gpu,
            "kvrouter.best_hit_tokens": choice.best_hit_tokens,
            "kvrouter.prefill_tokens": choice.prefill_tokens,
            "kvrouter.reason": choice.reason[:MAX_TEXT_CHARS],
        }
        if choice.lost:
            attributes["kvrouter.lost"] = choice.lost
        if choice.pull is not None:
            attributes["kvrouter.kv_source"] = choice.pull.source.route_name
            attributes["kvrouter.predicted_peer_tokens"] = max(0, choice.pull.tokens - choice.hit.tokens)
        self._child("choose", chosen_s, now, attributes)
        self._step_s = now

    def sending(self, worker: WorkerKey, host: str, port: int, headers: Headers, now: float) -> Headers:
        """Begin the span of a request to an engine, and end the one before it.

        Returns the headers with the new span in place of the client's.
        """
        if self._attempt is not None:
            # The previous request computed the prompt and handed it over.
            self._attempt.end(self._ns(now))
        self._attempts += 1
        span = self._attempt = self._tracing.tracer.start_span(
            f"engine {self._path}",
            context=self._context,
            kind=SpanKind.CLIENT,
            attributes={
                "http.request.method": "POST",
                "gen_ai.request.model": worker.model,
                "kvrouter.worker": worker.route_name,
                "kvrouter.attempt": self._attempts,
                "server.address": host,
                "server.port": port,
            },
            start_time=self._ns(now),
        )
        carrier: dict[str, str] = {}
        self._tracing.propagator.inject(carrier, set_span_in_context(span, Context()))
        other_headers = [header for header in headers if header[0] not in TRACE_HEADERS]
        return other_headers + [(name.encode(), value.encode("latin-1", "replace")) for name, value in carrier.items()]

    def failed(self, kind: str, text: str, now: float) -> None:
        """End the span of the current attempt, which got no usable answer."""
        span, self._attempt = self._attempt, None
        if span is not None:
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, text[:MAX_TEXT_CHARS]))
            span.end(self._ns(now))
        self._step_s = now

    def ended(self, outcome: str, status: int, first_s: float | None, report: ReuseReport | None, now: float) -> None:
        """End all spans of the request at `now`.

        `outcome` is one of those in `ProxyMetrics`. `status` is that of the engine's answer, 0 if there was none.
        `first_s` is the time of its first bytes or event, and `report` has the facts about reuse; both are None if there
        was no answer.
        """
        attributes: Attributes = {"kvrouter.outcome": outcome}
        if status:
            attributes["http.response.status_code"] = status
        if report is not None:
            attributes |= _usage(report)
        for span in (self._attempt, self._span):
            if span is None:
                continue
            span.set_attributes(attributes)
            if first_s is not None:
                span.add_event("first_token", timestamp=self._ns(first_s))
            if outcome not in ("ok", "client_error", "client_gone"):
                span.set_attribute("error.type", outcome)
                span.set_status(Status(StatusCode.ERROR))
            span.end(self._ns(now))
        self._attempt = None

    def answered(self, reply: Any, status: int, now: float) -> None:
        """End the span of a request that the router itself answers; for a choice, record the worker and the reason."""
        attributes: Attributes = {"http.response.status_code": status}
        if (overlap := getattr(reply, "overlap", None)) is not None:
            attributes |= {
                "gen_ai.request.model": reply.model,
                "kvrouter.worker": reply.worker_id,
                "kvrouter.dp_rank": reply.dp_rank,
                "kvrouter.selection_id": reply.selection_id,
                "kvrouter.prompt_tokens": reply.isl_tokens,
                "kvrouter.predicted_tokens": overlap.longest_matched,
                "kvrouter.predicted_gpu_tokens": overlap.gpu,
                "kvrouter.reason": reply.reason[:MAX_TEXT_CHARS],
            }
        self._span.set_attributes(attributes)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._ns(now))


def _usage(report: ReuseReport) -> Attributes:
    attributes: Attributes = {}
    if report.predicted is not None:
        attributes["kvrouter.predicted_tokens"] = report.predicted
    if report.reused is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = report.reused
    if report.pull is not None:
        attributes["kvrouter.kv_source"] = report.pull.source.route_name
        attributes["kvrouter.predicted_peer_tokens"] = report.pull.predicted
        if report.pull.delivered is not None:
            attributes["kvrouter.delivered_peer_tokens"] = report.pull.delivered
    if report.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = report.usage.prompt_tokens
        if report.usage.completion_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = report.usage.completion_tokens
    return attributes


def _carrier(headers: Headers) -> dict[str, str]:
    """Return the client's trace context; several tracestate headers form one list (W3C Trace Context, 3.3)."""
    trace_headers: dict[str, list[str]] = {}
    for name, value in headers:
        if name in TRACE_HEADERS:
            trace_headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
    parents = trace_headers.get("traceparent", [])
    # Two parents count as none.
    if len(parents) != 1:
        return {}
    return {name: ",".join(values) for name, values in trace_headers.items()}
