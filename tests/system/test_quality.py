# SPDX-License-Identifier: Apache-2.0
"""Simulated replicas behind `kvrouter serve`: predictions for OpenAI's client are delivered, counted and traced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from tests.support.collector import Collector
from tests.support.exchange import run_cli
from tests.support.fleet import rows, settle, until, wait_live
from tests.support.replica_process import MODEL, STOP_S, replicas, worker_flags
from tests.support.router_process import RouterProcess

REQUESTS = 40
# The length of some blocks of the shape, so that prefixes are reused and the pool evicts.
PROMPT_TOKENS = (200, 900)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running_collector:
        yield running_collector


@pytest.fixture
def router(tmp_path: Path, collector: Collector) -> Iterator[RouterProcess]:
    with replicas(2, "--shape", "gemma3", "--blocks", "600") as endpoints:
        flags = ["--otlp-endpoint", collector.url, *worker_flags(endpoints)]
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_SERVICE_NAME": "front door"}
        with RouterProcess(tmp_path, flags, environment) as started:
            # A replica without blocks has published nothing yet, so send each one a prompt.
            with client_of(started) as client:
                for number in range(2):
                    pin = {"x-kvrouter-worker": f"w{number}"}
                    client.completions.create(model=MODEL, prompt=[number + 1] * 100, max_tokens=1, extra_headers=pin)
            wait_live(started)
            yield started


def client_of(router: RouterProcess) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="x", max_retries=0, timeout=STOP_S)


def counted(router: RouterProcess, name: str, **labels: str) -> float:
    """Return the sum of a metric over all workers, for samples with these labels."""
    total = 0.0
    for line in router.text("/metrics").splitlines():
        is_of_metric = line.startswith((f"kvrouter_{name} ", f"kvrouter_{name}{{"))
        if is_of_metric and all(f'{label}="{value}"' in line for label, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def test_one_at_a_time_everything_predicted_is_delivered(router: RouterProcess, collector: Collector) -> None:
    rng = Random(7)
    prompts = [[rng.randrange(10, 50_000) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(4)]
    predicted = reused = 0
    before = {o: counted(router, "predictions_total", outcome=o) for o in ("exact", "less", "more", "untold")}
    with client_of(router) as client:
        for number in range(REQUESTS):
            settle(router)
            prompt = [
                *rng.choice(prompts[-5:])[: rng.randint(100, 800)],
                *(rng.randrange(10, 50_000) for _ in range(30)),
            ]
            prompts.append(prompt)
            create = client.completions.with_raw_response.create
            streams: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
            answer = create(model=MODEL, prompt=prompt, max_tokens=6, **streams)
            predicted += int(answer.headers["x-kvrouter-predicted-hit"])
            whole = list(answer.parse())[-1] if streams else answer.parse()
            reused += whole.usage.prompt_tokens_details.cached_tokens
    until(lambda: counted(router, "proxy_open_requests") == 0, "all is over")
    after = {o: counted(router, "predictions_total", outcome=o) for o in before}
    assert {o: after[o] - before[o] for o in before} == {"exact": REQUESTS, "less": 0, "more": 0, "untold": 0}
    assert (
        counted(router, "predicted_cached_tokens_total")
        == counted(router, "delivered_cached_tokens_total")
        == predicted
    )
    assert predicted == reused > 0
    assert counted(router, "token_count_mismatches_total") == 0
    for name, count in (("ttft", REQUESTS / 2), ("itl", REQUESTS / 2), ("e2e", REQUESTS + 2), ("choice", REQUESTS + 2)):
        assert counted(router, f"{name}_seconds_count") == count
    assert router.request("GET", "/health") == {"status": "ok", "reasons": []}
    # The rates of decoding are learned from the answers.
    shown = router.request("GET", "/loads")
    assert "decode" in json.dumps(shown)
    until(lambda: sum(span.kind == "SERVER" for span in collector.spans) == REQUESTS + 2, "every request is a trace")
    assert {span.resource["service.name"] for span in collector.spans} == {"front door"}


def test_events_of_another_engine_are_found_out_by_what_it_delivers(tmp_path: Path) -> None:
    """Swap the events of two engines that do not say which events are theirs.

    Engines that do say so are in test_wrong_endpoints.py.
    """
    with replicas(2, "--shape", "llama", "--no-event-sources") as endpoints:
        flags = []
        one, two = endpoints
        for name, engine, other in (("w0", one, two), ("w1", two, one)):
            spec = f"{name}={engine['url']},events={other['events']},replay={other['replay']},model={MODEL}"
            flags += ["--worker", spec]
        with RouterProcess(tmp_path, flags) as router, client_of(router) as client:
            rng = Random(3)
            create = client.completions.with_raw_response.create
            for _ in range(10):
                prompt = [rng.randrange(10, 50_000) for _ in range(300)]

                def at_w1(prompt: list[int] = prompt) -> bool:
                    answer = router.request("POST", "/query", {"model": MODEL, "token_ids": prompt})
                    return bool(answer["instances"]["w1"]["gpu"] >= 288)

                create(model=MODEL, prompt=prompt, max_tokens=1, extra_headers={"x-kvrouter-worker": "w0"})
                until(at_w1, "what w0 computed is said to be at w1")
                answer = create(model=MODEL, prompt=prompt, max_tokens=1, extra_headers={"x-kvrouter-worker": "w1"})
                assert int(answer.headers["x-kvrouter-predicted-hit"]) >= 288
                assert answer.parse().usage.prompt_tokens_details.cached_tokens == 0
            until(lambda: router.request("GET", "/health")["status"] == "degraded", "it is found out")
            shown = {name: row["predictions"] for name, row in rows(router).items()}
            assert shown["w1"].startswith("predictions do not come true: less was reused than predicted in ")
            assert "worker w1: " + shown["w1"] in router.request("GET", "/health")["reasons"]
            assert counted(router, "over_credit_tokens_total", worker="w1") >= 8 * 288
            url, wide = f"http://127.0.0.1:{router.port}", {**os.environ, "COLUMNS": "400"}
            table = run_cli("workers", "--url", url, check=True, env=wide)
            assert "predictions do not come true" in table.stdout


def test_what_a_prefill_worker_hands_over_is_a_trace_of_two_requests_and_no_prediction(
    tmp_path: Path, collector: Collector
) -> None:
    with replicas(2, "--shape", "llama") as endpoints:
        flags = ["--otlp-endpoint", collector.url, "--handover-token-cost", "0"]
        for name, role, endpoint in (("p0", "prefill", endpoints[0]), ("d0", "decode", endpoints[1])):
            spec = f"{name}={endpoint['url']},events={endpoint['events']},replay={endpoint['replay']},model={MODEL},role={role}"
            flags += ["--worker", spec]
        with RouterProcess(tmp_path, flags, {"OTEL_BSP_SCHEDULE_DELAY": "20"}) as router, client_of(router) as client:
            # Keep the decode worker busy, so that a hand-over pays.
            busy = {"model": MODEL, "worker_id": "d0", "isl_tokens": 60_000, "selection_id": "busy"}
            router.request("POST", "/reservations", busy)
            answer = client.completions.with_raw_response.create(model=MODEL, prompt=[*range(10, 2_010)], max_tokens=2)
            assert answer.headers["x-kvrouter-prefill-worker"] == "p0"
            name = "engine /v1/completions"
            spans = collector.trace(lambda named: f"{name} #2" in named)
            computing, decoding = spans[name], spans[f"{name} #2"]
            assert (computing.attributes["kvrouter.worker"], decoding.attributes["kvrouter.worker"]) == ("p0", "d0")
            assert computing.error is None and computing.end <= decoding.start
            until(lambda: counted(router, "predictions_unjudged_total", reason="unpredicted") == 1, "it is counted")
            assert counted(router, "predictions_total", outcome="untold", worker="d0") == 1
            assert counted(router, "predicted_cached_tokens_total") == 0


def test_a_collector_that_hangs_does_not_hold_up_the_end(router: RouterProcess, collector: Collector) -> None:
    with client_of(router) as client:
        client.completions.create(model=MODEL, prompt=[1] * 50, max_tokens=1)
    collector.hangs.set()
    router.signal(15)
    # The exporter alone would wait for twice as long as this test does.
    assert router.wait() == 0


def test_traces_without_their_package_are_refused_with_the_fix(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\nfrom kvrouter.router.app.cli.commands import main; main()"
    )
    flags = ["serve", "--port", "0", "--otlp-endpoint", "http://h:1"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode != 0
    assert "pip install 'opentelemetry-sdk<2,>=1.30' 'opentelemetry-exporter-otlp-proto-http<2,>=1.30'" in done.stderr
    assert "Traceback" not in done.stderr
