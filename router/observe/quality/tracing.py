# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces of requests: one span each for the request, its tokens, its wait, its choice and each attempt at
an engine.

The only module that imports the SDK (extra `otel`); imported where `otlp_endpoint` is set. Spans are made with the
times that the proxy has anyway, and handed to a thread of the SDK that exports them: when it does not get rid of them,
they are dropped and counted, and no request waits. W3C context (`traceparent`, `tracestate`) is taken from the client
and given on to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
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

log = logging.getLogger("kvrouter.quality")

# Where collectors take traces over HTTP, under the address that is usually given. Source: OTLP 1.x specification.
TRACES_PATH = "/v1/traces"
# Some seconds of a busy router (1,000 requests/s with six spans), some ten MB; a longer outage of the collector loses
# spans.
QUEUE_SPANS = 16_384
# At the end: what a collector that answers needs, and one that does not must not hold up.
CLOSE_S = 3.0
CLOSE_LOOK_S = 0.02
SERVICE = "kvrouter"
NS = 1_000_000_000
# Text of others (an engine's error, a reason) in an attribute.
MAX_TEXT_CHARS = 1_024

TRACE_HEADERS = (b"traceparent", b"tracestate")
# gen_ai.operation.name, by path. Source: OpenTelemetry semantic conventions for generative AI.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
}

Attributes = dict[str, Any]
Headers = list[tuple[bytes, bytes]]


def traces_url(endpoint: str) -> str:
    """The address of the setting, with the path of traces where it has not got it."""
    return endpoint if endpoint.rstrip("/").endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH


class _Exporter(SpanExporter):
    """Counts what the exporter gets rid of; its failure is one line, and so is its end. In the SDK's thread."""

    def __init__(self, inner: Any, spans: Counter, endpoint: str) -> None:
        self._inner = inner
        self._exported = spans.labels("exported")
        self._failed = spans.labels("failed")
        self._endpoint = endpoint
        self._fails = False
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
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
        self._inner.shutdown()


class _Processor(SpanProcessor):
    """Hands spans to the SDK's own processor as long as it has room."""

    def __init__(self, exporter: _Exporter, spans: Counter) -> None:
        self._exporter = exporter
        # The SDK has no types for its end.
        self._inner: Any = BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS)
        self._dropped = spans.labels("dropped")
        self._given = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._given - self._exporter.taken >= QUEUE_SPANS:
            self._dropped.inc()
            return
        self._given += 1
        self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._inner.force_flush(timeout_millis))


class Tracing:
    """Of one process. `close` at the end.

    spans: counts them by outcome. The SDK's own variables (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS ...) hold as they do for everybody."""

    def __init__(self, endpoint: str, spans: Counter) -> None:
        url = traces_url(endpoint)
        for outcome in ("exported", "failed", "dropped"):
            spans.labels(outcome)
        self._sender: Any = OTLPSpanExporter(endpoint=url)
        exporter = _Exporter(self._sender, spans, without_password(endpoint))
        resource = Resource.create({"service.version": VERSION})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        # Ended by `close`, in its time, and not by the interpreter's end.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_Processor(exporter, spans))
        self.tracer = self._provider.get_tracer("kvrouter.router", VERSION)
        self.propagator = TraceContextTextMapPropagator()

    def request(self, path: str, headers: Headers, now: float, request_id: str = "") -> RequestTrace:
        """A request that came at `now`, under the client's span where it names one."""
        return RequestTrace(self, path, headers, now, request_id)

    async def close(self) -> None:
        """Exports what is left, in the time that there is."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True, name="traces-end")
        thread.start()
        deadline_s = time.monotonic() + CLOSE_S
        while thread.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(CLOSE_LOOK_S)
        if thread.is_alive():
            # Ends its attempts at a collector that is away.
            self._sender.shutdown()


class RequestTrace:
    """The spans of one request. Times are the proxy's clock's, in seconds."""

    def __init__(self, tracing: Tracing, path: str, headers: Headers, now: float, request_id: str = "") -> None:
        self._tracing = tracing
        self._path = path
        # Spans have wall-clock times.
        self._offset_ns = time.time_ns() - int(now * NS)
        self._began_s = self._step_s = now
        attributes: Attributes = {"http.request.method": "POST", "http.route": path, "url.path": path}
        if request_id:
            attributes["kvrouter.request_id"] = request_id
        if path in OPERATIONS:
            attributes["gen_ai.operation.name"] = OPERATIONS[path]
        self._span = tracing.tracer.start_span(
            f"POST {path}",
            context=tracing.propagator.extract(_carrier(headers), Context()),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=self._ns(now),
        )
        self._context = set_span_in_context(self._span, Context())
        self._attempt: Span | None = None
        self._attempts = 0

    def _ns(self, at: float) -> int:
        return int(at * NS) + self._offset_ns

    def _child(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        span = self._tracing.tracer.start_span(
            name, context=self._context, attributes=attributes, start_time=self._ns(began_s)
        )
        span.end(self._ns(ended_s))

    def asked(self, ask: PlacementRequest, now: float) -> None:
        """The model is resolved and the prompt's tokens are found, or not."""
        question = ask.question
        self._span.set_attribute("gen_ai.request.model", question.model)
        if ask.max_tokens is not None:
            self._span.set_attribute("gen_ai.request.max_tokens", ask.max_tokens)
        known = 0 if question.token_ids is None else len(question.token_ids)
        attributes = {"kvrouter.prompt_tokens": question.num_tokens, "kvrouter.known_tokens": known}
        self._child("tokens", self._step_s, now, attributes)
        self._step_s = now

    def placed(self, placement: Placement, now: float) -> None:
        """`placed_s` is when the choice began; what is before it was the wait for a worker."""
        chosen_s = min(max(placement.placed_s, self._step_s), now)
        if placement.queued_s > 0:
            self._child("queue", self._step_s, chosen_s, {"kvrouter.queued_s": placement.queued_s})
        choice, worker = placement.choice, placement.worker
        attributes: Attributes = {
            "gen_ai.request.model": worker.model,
            "kvrouter.worker": worker.route_name,
            "kvrouter.selection_id": placement.selection_id,
            "kvrouter.predicted_tokens": choice.hit.disk,
            "kvrouter.predicted_gpu_tokens": choice.hit.gpu,
            "kvrouter.best_hit_tokens": choice.best_hit_tokens,
            "kvrouter.prefill_tokens": choice.prefill_tokens,
            "kvrouter.reason": choice.reason[:MAX_TEXT_CHARS],
        }
        if choice.lost:
            attributes["kvrouter.lost"] = choice.lost
        self._child("choose", chosen_s, now, attributes)
        self._step_s = now

    def sending(self, worker: WorkerKey, host: str, port: int, headers: Headers, now: float) -> Headers:
        """A request to an engine begins, and the one before it is over; the headers with its span in the place of the
        client's."""
        if self._attempt is not None:
            # It computed the prompt and handed it over.
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
        kept = [header for header in headers if header[0] not in TRACE_HEADERS]
        return kept + [(name.encode(), value.encode("latin-1", "replace")) for name, value in carrier.items()]

    def failed(self, kind: str, text: str, now: float) -> None:
        """It ended without an answer that is of use."""
        span, self._attempt = self._attempt, None
        if span is not None:
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, text[:MAX_TEXT_CHARS]))
            span.end(self._ns(now))
        self._step_s = now

    def ended(self, outcome: str, status: int, first_s: float | None, told: ReuseReport | None, now: float) -> None:
        """outcome: as in `ProxyMetrics`; status: of the engine's answer, 0: none; first_s: of its first bytes
        or event."""
        attributes: Attributes = {"kvrouter.outcome": outcome}
        if status:
            attributes["http.response.status_code"] = status
        if told is not None:
            attributes |= _usage(told)
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
        """An answer of the router's own; of a choice, who was chosen and why."""
        attributes: Attributes = {"http.response.status_code": status}
        if (overlap := getattr(reply, "overlap", None)) is not None:
            attributes |= {
                "gen_ai.request.model": reply.model,
                "kvrouter.worker": reply.worker_id,
                "kvrouter.dp_rank": reply.dp_rank,
                "kvrouter.selection_id": reply.selection_id,
                "kvrouter.prompt_tokens": reply.isl_tokens,
                "kvrouter.predicted_tokens": overlap.disk,
                "kvrouter.predicted_gpu_tokens": overlap.gpu,
                "kvrouter.reason": reply.reason[:MAX_TEXT_CHARS],
            }
        self._span.set_attributes(attributes)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._ns(now))


def _usage(told: ReuseReport) -> Attributes:
    found: Attributes = {}
    if told.predicted is not None:
        found["kvrouter.predicted_tokens"] = told.predicted
    if told.delivered is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = told.delivered
    if told.usage is not None:
        found["gen_ai.usage.input_tokens"] = told.usage.prompt_tokens
        if told.usage.completion_tokens is not None:
            found["gen_ai.usage.output_tokens"] = told.usage.completion_tokens
    return found


def _carrier(headers: Headers) -> dict[str, str]:
    """The client's trace context; several tracestate headers are one list (W3C Trace Context, 3.3)."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in TRACE_HEADERS:
            found.setdefault(name.decode(), []).append(value.decode("latin-1"))
    parents = found.get("traceparent", [])
    # Two parents are none.
    if len(parents) != 1:
        return {}
    return {name: ",".join(values) for name, values in found.items()}
