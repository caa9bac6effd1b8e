# SPDX-License-Identifier: Apache-2.0
"""An OpenTelemetry collector for tests.

It accepts OTLP over HTTP, decodes it with the protocol's own package, and keeps the spans.
"""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tests.support.quiet_server import QuietServer

WAIT_S = 30.0


class Seen(msgspec.Struct):
    """One received span; ids are hexadecimal, times are in nanoseconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    # Id of the parent span; empty for a root.
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    # Time of each event, by the event's name.
    events: dict[str, int]
    error: str | None
    tracestate: str
    resource: dict[str, Any]


class Collector:
    """A collector that listens in a thread from entry to exit."""

    def __init__(self) -> None:
        # The HTTP status of each answer; spans are kept only with 200.
        self.status = 200
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.paths: set[str] = set()
        # While this is set, no request is answered.
        self.hangs = threading.Event()
        self._spans: list[Seen] = []
        self._ends = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.add(self.path)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                raw = self.rfile.read(int(self.headers["content-length"]))
                outer.requests += 1
                while outer.hangs.is_set() and not outer._ends.wait(0.01):
                    pass
                if outer.status == 200:
                    outer._take(raw)
                self.send_response(outer.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)

    def _take(self, raw: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            resource_attributes = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self._spans += [_seen(span, resource_attributes) for span in scope.spans]

    def trace(self, whole: Callable[[dict[str, Seen]], bool] = lambda spans: True) -> dict[str, Seen]:
        """Wait for one complete trace and return its spans by name (`choose`, `choose #2`).

        It is complete once its root span has arrived and `whole` returns True for its spans. Fails if spans of several
        traces have arrived.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            spans = sorted(self._spans, key=lambda span: span.start)
            named: dict[str, Seen] = {}
            for span in spans:
                same = sum(other.name == span.name for other in named.values())
                named[f"{span.name} #{same + 1}" if same else span.name] = span
            if any(span.kind == "SERVER" for span in spans) and whole(named):
                assert len({span.trace_id for span in spans}) == 1
                return named
            assert time.monotonic() < deadline, f"not in {WAIT_S:g} s: a whole trace, only {sorted(named)}"
            time.sleep(0.02)

    def clear(self) -> None:
        self._spans.clear()

    @property
    def spans(self) -> list[Seen]:
        return list(self._spans)


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events={event.name: event.time_unix_nano for event in span.events},
        error=span.status.message if span.status.code == 2 else None,
        tracestate=span.trace_state,
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
