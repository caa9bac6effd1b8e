# SPDX-License-Identifier: Apache-2.0
"""The metrics page of a router with traffic has what the dashboard and the alert rules query."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.router.base.common.version import VERSION
from kvrouter.simulator.cache.shapes import make_geometry
from kvrouter.simulator.http.server import ReplicaServer, ServerThread
from tests.support.fleet import until
from tests.support.monitoring_files import alert_rules, dashboard_queries
from tests.support.replica_process import worker_flags
from tests.support.router_process import RouterProcess

MODEL = "sim"
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "metrics.json"
NAME = re.compile(r"\b(?:kvrouter|process)_\w+")
SELECTOR = re.compile(r"\b((?:kvrouter|process)_\w+)\{([^}]*)\}")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
# Suffixes of a histogram's samples; `le` is on its buckets.
PARTS = ("_bucket", "_sum", "_count")
# Metrics that are counted last: by events of the engines, and after an answer.
COUNTED = (
    *("resident_blocks", "stream_event_lag_seconds", "achievable_hit_tokens_total", "delivered_cached_tokens_total"),
    *("ttft_seconds_count", "itl_seconds_count", "e2e_seconds_count"),
)
# Labels that Prometheus adds to each sample.
SCRAPED = {"instance", "job"}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Start a router with two workers that were sent prompts, some of them again."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        replicas = [ReplicaServer(make_geometry("gemma3"), 512, context=context, model=MODEL) for _ in range(2)]
        thread = ServerThread(replicas)
        thread.start()
        flags = worker_flags(replica.endpoints for replica in replicas)
        with RouterProcess(tmp_path_factory.mktemp("router"), flags) as process:
            numbers = itertools.count()
            missing: set[str] = set()

            def counts() -> bool:
                """Send one more prompt, and return whether everything that traffic counts is counted."""
                number = next(numbers)
                # Some prompts come again, and new ones come all the time, about which engines publish events. Streams
                # have a time to first token, and times between tokens.
                body = {"model": MODEL, "prompt": [number // 4 + 1] * 300, "max_tokens": 3, "stream": number % 2 == 1}
                options = {"stream_options": {"include_usage": True}} if body["stream"] else {}
                process.text("/v1/completions", body | options)
                values = [(sample.name, sample.value) for family in families(process) for sample in family.samples]
                counted = {name for name, value in values if value > 0}
                missing.clear()
                missing.update(name for name in COUNTED if f"kvrouter_{name}" not in counted)
                return not missing

            try:
                until(counts, "traffic is counted")
            except AssertionError:
                raise AssertionError(f"not counted: {missing}; {process.log_tail()}") from None
            yield process
        thread.stop()


def families(router: RouterProcess) -> list[Metric]:
    return list(text_string_to_metric_families(router.text("/metrics")))


def labels_by_name(page_metrics: list[Metric]) -> dict[str, set[str]]:
    """Return the labels of every name on the page that a query may have.

    These are the promised labels, because a metric that was not counted yet shows none.
    """
    promised = json.loads(GOLDEN.read_text())
    named: dict[str, set[str]] = {}
    for family in page_metrics:
        labels = set(promised[family.name]["labels"]) if family.name in promised else set()
        named[family.name + ("_total" if family.type == "counter" else "")] = labels
        if family.type == "histogram":
            named |= {family.name + part: labels | {"le"} for part in PARTS}
    return named


def queries() -> list[str]:
    return [*dashboard_queries(), *(rule["expr"] for rule in alert_rules())]


def test_every_metric_that_is_queried_is_on_the_page_with_the_labels_of_the_query(router: RouterProcess) -> None:
    named = labels_by_name(families(router))
    assert len(queries()) > 50
    for query in queries():
        used = set(NAME.findall(query))
        assert used and not used - named.keys(), query
        for name, matchers in SELECTOR.findall(query):
            wanted = set(re.findall(r"(\w+)[=!]~?=?\"", matchers))
            assert wanted <= named[name], query
        known_labels = set().union(*(named[name] for name in used)) | SCRAPED
        grouped = {label.strip() for labels in GROUPING.findall(query) for label in labels.split(",")}
        assert grouped <= known_labels, query


def test_what_traffic_counts_has_samples(router: RouterProcess) -> None:
    counted = {sample.name for family in families(router) for sample in family.samples}
    silent = {name for query in dashboard_queries() for name in NAME.findall(query)} - counted
    # A metric of a failure is shown once that failure has happened.
    assert silent <= {
        *("kvrouter_proxy_breaker_state", "kvrouter_proxy_failures_total", "kvrouter_queue_requests"),
        *("kvrouter_queue_refused_total", "kvrouter_lost_hit_tokens_total", "kvrouter_stream_resyncs_total"),
        # These engines fetch nothing from each other.
        *("kvrouter_peer_pulls_total", "kvrouter_peer_pull_seconds_bucket"),
        *("kvrouter_peer_tokens_predicted_total", "kvrouter_peer_tokens_delivered_total"),
    }


def test_the_page_has_the_build_the_blocks_held_and_nothing_created(router: RouterProcess) -> None:
    assert router.metric("kvrouter_build_info", version=VERSION) == 1

    def held() -> dict[tuple[str, str, str], float]:
        return {
            (row["worker_id"], place.partition(":")[0][1:], place.split(":")[1]): count
            for row in router.request("GET", "/workers")["workers"]
            for place, count in row["residency"].items()
        }

    def shown() -> dict[tuple[str, str, str], float]:
        return {
            (sample.labels["worker"], sample.labels["group"], sample.labels["medium"]): sample.value
            for family in families(router)
            for sample in family.samples
            if family.name == "kvrouter_resident_blocks" and sample.labels["model"] == MODEL
        }

    # Events of the last prompt may come between the two requests.
    until(lambda: shown() == held() and len(held()) > 1, "the blocks held are those of /workers")
    assert "_created" not in router.text("/metrics")
