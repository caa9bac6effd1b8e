# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of the tally are shown as prometheus_client would show them."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from kvrouter.router.base.common.tally import Counter, Histogram

BUCKETS = (0.0005, 0.25, 1.0, 30.0)
VALUES = st.floats(0, 100) | st.sampled_from(BUCKETS)


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\', "c\n", ""]), VALUES), max_size=20))
def test_the_page_equals_that_of_prometheus_client(counted: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own_metrics: list[Any] = [
        Counter("x_total", "Text", ("name",), ours),
        Histogram("y", "Text", ("name",), ours, BUCKETS),
        Counter("alone", "Text", (), ours),
        Histogram("z", "Text", (), ours, BUCKETS),
    ]
    library: list[Any] = [
        prometheus_client.Counter("x_total", "Text", ("name",), registry=theirs),
        prometheus_client.Histogram("y", "Text", ("name",), registry=theirs, buckets=BUCKETS),
        prometheus_client.Counter("alone", "Text", registry=theirs),
        prometheus_client.Histogram("z", "Text", registry=theirs, buckets=BUCKETS),
    ]
    for counter, histogram, alone, spread in (own_metrics, library):
        for name, value in counted:
            counter.labels(name).inc(value)
            histogram.labels(name).observe(value)
            alone.inc()
            spread.observe(value)
    page = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == page
    assert "".join(metric.text() for metric in own_metrics).splitlines() == page


def test_a_removed_series_is_shown_no_longer_and_begins_at_zero() -> None:
    registry = CollectorRegistry()
    counter = Counter("x_total", "Text", ("name",), registry)
    counter.labels("a").inc(3)
    counter.remove("a")
    assert registry.get_sample_value("x_total", {"name": "a"}) is None
    with pytest.raises(KeyError):
        counter.remove("a")
    counter.labels("a").inc()
    assert registry.get_sample_value("x_total", {"name": "a"}) == 1


def test_missing_labels_are_an_error() -> None:
    counter = Counter("x_total", "Text", ("name", "code"), CollectorRegistry())
    with pytest.raises(ValueError, match="labels"):
        counter.labels("a")
    assert counter.labels("a", 200) is counter.labels("a", "200")
