# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: the collector's spans, the engine's headers, and no waiting for a collector.

The sockets are real.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time

import pytest

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.config.settings import Config
from kvrouter.router.observe.quality import tracing
from kvrouter.router.observe.quality.tracing import traces_url
from kvrouter.router.route.placement.planned_pull import PlannedPull
from tests.contract.proxy_support import CHAT, COMPLETIONS, fleet, until
from tests.support.collector import Collector, Seen
from tests.support.scripted_engine import Asked, ScriptedEngine, hang, plain, reset, stream

TOKENS = {"model": "m", "prompt": list(range(1, 100)), "max_tokens": 4}
USAGE = {"prompt_tokens": 99, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 80}}
ANSWER = plain(json.dumps({"usage": USAGE}).encode())
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    # Spans are exported every 5 s by default.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    logging.getLogger("opentelemetry").setLevel("CRITICAL")


def parts_of(asked: Asked) -> tuple[str, str, str]:
    """Return the trace id, the span id and the flags that an engine got."""
    (traceparent,) = asked.all("traceparent")
    version, trace_id, span_id, flags = traceparent.split("-")
    assert version == "00"
    return trace_id, span_id, flags


def test_without_tracing_the_clients_context_goes_through_untouched() -> None:
    with fleet(ANSWER) as (router, engine):
        context = {"traceparent": "00-odd-as-it-is", "tracestate": "a=1,b=2", "baggage": "user=x"}
        router.post(COMPLETIONS, TOKENS, context)
        (asked,) = engine.asked
        assert {name: asked.all(name) for name in context} == {name: [value] for name, value in context.items()}


def test_a_request_is_a_trace_from_the_client_to_the_engine() -> None:
    pieces = [b'data: {"choices": [1]}\n\n'] * 2 + [b"data: " + json.dumps({"usage": USAGE}).encode() + b"\n\n"]
    with Collector() as collector, fleet(stream(pieces), otlp_endpoint=collector.url) as (router, engine):
        sent = {"traceparent": PARENT, "tracestate": "vendor=1", "baggage": "user=x"}
        router.post(COMPLETIONS, TOKENS | {"stream": True}, sent)
        spans = collector.trace(lambda named: len(named) == 4)
        root, attempt = spans[f"POST {COMPLETIONS}"], spans[f"engine {COMPLETIONS}"]
        assert set(spans) == {root.name, "tokens", "choose", f"engine {COMPLETIONS}"}
        assert (root.trace_id, root.parent, root.kind, root.tracestate) == (TRACE_ID, PARENT_ID, "SERVER", "vendor=1")
        assert {span.parent for span in spans.values() if span is not root} == {root.span_id}
        (asked,) = engine.asked
        assert parts_of(asked) == (TRACE_ID, attempt.span_id, "01")
        assert asked.all("tracestate") == ["vendor=1"] and asked.all("baggage") == ["user=x"]
        assert (
            root.attributes
            | {
                "http.response.status_code": 200,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": "m",
                "gen_ai.request.max_tokens": 4,
                "gen_ai.usage.input_tokens": 99,
                "gen_ai.usage.output_tokens": 2,
                "gen_ai.usage.cache_read.input_tokens": 80,
                "kvrouter.predicted_tokens": 96,
                "kvrouter.outcome": "ok",
            }
            == root.attributes
        )
        assert root.resource["service.name"] == "kvrouter"
        assert spans["choose"].attributes["kvrouter.worker"] == "w0"
        assert spans["choose"].attributes["kvrouter.reason"] == "first fit"
        assert spans["tokens"].attributes == {
            "kvrouter.prompt_tokens": 99,
            "kvrouter.known_tokens": 99,
            "kvrouter.prompts": 1,
        }
        assert all(root.start <= span.start <= span.end <= root.end for span in spans.values())
        assert attempt.start <= attempt.events["first_token"] <= attempt.end
        # The times are those of a wall clock, within an hour, not of a monotonic clock.
        assert abs(root.start - time.time_ns()) < 3_600e9
        assert collector.paths == {"/v1/traces"}
        until(lambda: router.sample("trace_spans_total", outcome="exported") == 4, "they are counted")


def test_a_trace_names_the_source_of_fetched_blocks() -> None:
    pull = PlannedPull(WorkerKey("m", "w9"), "10.0.0.9", 5710, 98, 2, 0.25)
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 97}}
    answer = plain(json.dumps({"usage": usage}).encode())
    with Collector() as collector, fleet(answer, otlp_endpoint=collector.url) as (router, _):
        router.placer.pulls["w0"] = pull
        router.post(COMPLETIONS, TOKENS)
        spans = collector.trace(lambda named: len(named) == 4)
        planned = {"kvrouter.kv_source": "w9", "kvrouter.predicted_peer_tokens": 2}
        delivered = {"kvrouter.delivered_peer_tokens": 1, "gen_ai.usage.cache_read.input_tokens": 97}
        assert spans["choose"].attributes.items() >= planned.items()
        for name in (f"POST {COMPLETIONS}", f"engine {COMPLETIONS}"):
            assert spans[name].attributes.items() >= (planned | delivered).items()


def test_each_attempt_is_a_span() -> None:
    with (
        Collector() as collector,
        fleet(reset, plain(b"{}", "503 Gone"), ANSWER, otlp_endpoint=collector.url) as (router, *engines),
    ):
        # A request reaches two engines at most, so the client gets the answer of the second.
        assert router.post(CHAT, {"model": "m", "messages": []})[0] == 503
        spans = collector.trace(lambda named: len(named) == 6)
        attempts = [spans[f"engine {CHAT}"], spans[f"engine {CHAT} #2"]]
        assert [span.attributes["kvrouter.worker"] for span in attempts] == ["w0", "w1"]
        assert attempts[0].attributes["error.type"] == "reset" and attempts[0].error
        for span, engine in zip(attempts, engines, strict=False):
            assert parts_of(engine.asked[0])[1] == span.span_id
        root = spans[f"POST {CHAT}"]
        assert root.parent == "" and root.error is not None
        assert (root.attributes["kvrouter.outcome"], root.attributes["http.response.status_code"]) == (
            "server_error",
            503,
        )


def test_a_gateways_answer_that_stays_the_best_ends_its_trace() -> None:
    with Collector() as collector, fleet(plain(b"{}", "503 Gone"), otlp_endpoint=collector.url) as (router, _):
        assert router.post(CHAT, {"model": "m", "messages": []})[0] == 503
        spans = collector.trace(lambda named: f"engine {CHAT}" in named)
        assert spans[f"engine {CHAT}"].attributes["error.type"] == "gone"
        assert spans[f"POST {CHAT}"].attributes["http.response.status_code"] == 503


def test_a_refused_request_is_a_trace_too() -> None:
    with Collector() as collector, fleet(ANSWER, otlp_endpoint=collector.url) as (router, _):
        router.post(CHAT, {"model": "nope", "messages": []})
        (root,) = collector.trace().values()
        assert root.attributes["kvrouter.outcome"] == "refused" and root.error is not None


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-odd"},
        {"traceparent": f"00-{'0' * 32}-{PARENT_ID}-01"},
        {"traceparent": "\xff" * 300},
        {"tracestate": "a=1"},
    ],
)
def test_an_invalid_context_begins_a_trace(headers: dict[str, str]) -> None:
    with Collector() as collector, fleet(ANSWER, otlp_endpoint=collector.url) as (router, engine):
        assert router.post(COMPLETIONS, TOKENS, headers)[0] == 200
        root = collector.trace()[f"POST {COMPLETIONS}"]
        assert root.parent == "" and root.trace_id != TRACE_ID
        assert parts_of(engine.asked[0])[0] == root.trace_id
        assert engine.asked[0].all("tracestate") == []


def test_an_unsampled_context_is_passed_on_unsampled() -> None:
    with Collector() as collector, fleet(ANSWER, otlp_endpoint=collector.url) as (router, engine):
        router.post(COMPLETIONS, TOKENS, {"traceparent": PARENT[:-1] + "0"})
        router.post(COMPLETIONS, TOKENS)
        assert collector.trace()[f"POST {COMPLETIONS}"].trace_id != TRACE_ID
        assert parts_of(engine.asked[0])[::2] == (TRACE_ID, "00")


def test_a_selection_is_a_trace_with_its_reason() -> None:
    with Collector() as collector, fleet(ANSWER, otlp_endpoint=collector.url) as (router, _):
        router.core.hits_known = [Hit(worker, all_on_gpu(2), "live") for worker in router.core.registered]
        status, _, raw = router.post("/select", {"model": "m", "token_ids": [1, 2, 3]}, {"traceparent": PARENT})
        reply = json.loads(raw)
        assert status == 200
        root = collector.trace()["POST /select"]
        assert root.attributes["kvrouter.reason"] == reply["reason"]
        assert root.attributes["kvrouter.selection_id"] == reply["selection_id"]
        assert (root.trace_id, root.parent) == (TRACE_ID, PARENT_ID)


def test_a_collector_that_hangs_holds_nobody_up_and_what_it_misses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "QUEUE_SPANS", 8)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with Collector() as collector, fleet(ANSWER, otlp_endpoint=collector.url) as (router, _):
        collector.hangs.set()
        for _n in range(10):
            assert router.post(COMPLETIONS, TOKENS)[0] == 200
        # There are 40 spans; at most 8 wait and 4 are in flight.
        until(lambda: router.sample("trace_spans_total", outcome="dropped") >= 28, "the rest is dropped")
        assert router.sample("trace_spans_total", outcome="exported") == 0
        collector.hangs.clear()
        until(lambda: router.sample("trace_spans_total", outcome="exported") >= 8, "what waited is exported")
        before = router.sample("trace_spans_total", outcome="dropped")
        router.post(COMPLETIONS, TOKENS)
        assert router.sample("trace_spans_total", outcome="dropped") == before


def test_a_collector_that_refuses_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as collector, fleet(ANSWER, otlp_endpoint=collector.url + "/v1/traces") as (router, _):
        caplog.set_level("INFO", "kvrouter.quality")
        logging.getLogger("kvrouter.quality").addHandler(caplog.handler)
        try:
            collector.status = 400
            for n in range(3):
                router.post(COMPLETIONS, TOKENS)
                until(lambda n=n: router.sample("trace_spans_total", outcome="failed") == 4 * (n + 1), "it fails")  # type: ignore[misc]
            collector.status = 200
            router.post(COMPLETIONS, TOKENS)
            until(lambda: router.sample("trace_spans_total", outcome="exported") == 4, "it works again")
            until(lambda: len(caplog.records) >= 2, "it is said")
        finally:
            logging.getLogger("kvrouter.quality").removeHandler(caplog.handler)
    messages = [record.getMessage() for record in dict.fromkeys(caplog.records)]
    assert [text.partition(":")[0] for text in messages] == ["traces are lost", "traces are exported again"]


def exports_end() -> bool:
    return all(thread.name != "traces-end" for thread in threading.enumerate())


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    with Collector() as collector:
        collector.hangs.set()
        with fleet(ANSWER, otlp_endpoint=collector.url) as (router, _):
            router.post(COMPLETIONS, TOKENS)
        # The router has ended, and its last export still waits for an answer.
        assert not exports_end()
    until(exports_end, "the export is over")


def test_a_collector_that_is_away_is_not_tried_on_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    with ScriptedEngine(reset) as away:
        with fleet(ANSWER, otlp_endpoint=away.url) as (router, _):
            router.post(COMPLETIONS, TOKENS)
        until(exports_end, "the export is over")
        # The SDK alone would try for 10 s, which is four times and more.
        assert len(away.asked) < 3


def test_a_client_that_hangs_up_ends_its_trace() -> None:
    with Collector() as collector, fleet(hang, otlp_endpoint=collector.url) as (router, engine):
        with router.connect() as client:
            body = json.dumps(TOKENS).encode()
            client.sendall(
                b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body))
                + body
            )
            until(lambda: bool(engine.asked), "it is under way")
        root: Seen = collector.trace()[f"POST {COMPLETIONS}"]
        assert root.attributes["kvrouter.outcome"] == "client_gone" and root.error is None


def test_the_endpoint_is_a_collector_or_its_traces() -> None:
    assert traces_url("http://otel:4318") == traces_url("http://otel:4318/") == "http://otel:4318/v1/traces"
    assert traces_url("http://otel/x/v1/traces") == "http://otel/x/v1/traces"
    with pytest.raises(SettingError, match="a collector's URL"):
        from kvrouter.router.model.config.loading import load_config

        load_config(None, {}, {"otlp_endpoint": "otel:4317"})
    assert Config().otlp_endpoint is None


def test_without_traces_no_sdk_of_traces_is_loaded() -> None:
    # Only the SDK of traces counts, because redis-py loads that of metrics wherever it is installed.
    parts = ("opentelemetry.sdk.trace", "opentelemetry.exporter")
    code = f"import kvrouter.router.app.server.app, sys; print([m for m in sys.modules if m.startswith({parts})])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
