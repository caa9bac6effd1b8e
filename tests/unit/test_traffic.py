# SPDX-License-Identifier: Apache-2.0
"""The generator of traffic: classes have their quotas, equal seeds give equal traffic, and measures are right."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.traffic.outcome import ENDLESS, POOLED, Outcome, verdict
from benchmarks.traffic.prompts import trace_and_fleet
from benchmarks.traffic.report import report_values
from benchmarks.traffic.shape import PIECE_TOKENS, QUOTA, Shape, classes, draw, draw_rotation

SEED = 7


def outcome(policy: str, reused: int, ttft_s: float, span_s: float = 10.0) -> Outcome:
    return Outcome(SEED, 0, False, policy, 100, 1_000, reused, ttft_s, ttft_s, span_s, 0.0)


def test_every_class_has_its_quota() -> None:
    counts = Counter(name for number in range(300) for name in classes(draw(SEED, number)))
    assert min(counts.values()) >= QUOTA
    assert set(counts) >= {
        "idle", "busy", "burst", "saturated", "sharing: system", "sharing: tenants", "sharing: tree",
        "sharing: documents", "sharing: nothing", "2-4 replicas", "8 replicas", "16-64 replicas", "CPU tier",
        "heterogeneous", "restart", "turns in haste", "drift",
    }  # fmt: skip


@pytest.mark.parametrize("shape", [draw(SEED, number) for number in range(12)] + [draw_rotation(SEED, 0)], ids=str)
def test_a_shape_is_the_same_traffic_each_time_and_keeps_its_words(shape: Shape) -> None:
    (trace, fleet), (again, _) = trace_and_fleet(shape), trace_and_fleet(shape)
    rows = [
        (request.time_s, request.prompt_tokens, request.pieces.tolist(), request.session) for request in trace.requests
    ]
    assert rows == [
        (request.time_s, request.prompt_tokens, request.pieces.tolist(), request.session) for request in again.requests
    ]
    assert len(rows) == shape.requests and len(fleet.replicas) == shape.workers
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    first = {session: pieces[0] for _, _, pieces, session in reversed(rows)}
    if shape.sharing in ("system", "tree") and shape.shared_tokens > 8 * PIECE_TOKENS:
        assert len(set(first.values())) < len(first)
    if shape.sharing == "nothing" and shape.order != "rotation":
        assert len(set(first.values())) == len(first)
    # A later turn begins with all whole pieces of the turn before.
    latest: dict[int | None, list[int]] = {}
    for _, tokens, pieces, session in rows:
        assert (len(pieces) - 1) * PIECE_TOKENS < tokens <= len(pieces) * PIECE_TOKENS
        if shape.order != "depth" or shape.pace == "idle":
            earlier = latest.get(session, [])
            assert pieces[: len(earlier)] == earlier
        latest[session] = pieces[:-1]


def test_each_figure_is_compared_with_its_own_champion() -> None:
    own = outcome("kv", 500, 0.098)
    peers = [outcome("a", 700, 0.200), outcome("b", 510, 0.099), outcome("c", 100, 0.050, span_s=5.0)]
    measured = verdict(own, peers, outcome(POOLED, 800, 0.0), outcome(ENDLESS, 1_000, 0.0))
    assert measured.champions == ("a", "b", "c", "c") and not measured.ahead
    assert measured.reuse == pytest.approx(0.505 / 0.705) and measured.reuse_among_soon == pytest.approx(0.505 / 0.515)
    assert measured.ttft == pytest.approx(0.052 / 0.1) and measured.throughput == pytest.approx(0.5)
    assert measured.of_pooled == pytest.approx(0.505 / 0.805)
    assert measured.of_endless == pytest.approx(0.505 / 1.005)
    assert verdict(own, [outcome("d", 600, 0.090)], own, own).ahead == ("d",)


def test_a_report_names_the_shapes_on_which_a_peer_is_better() -> None:
    runs = {policy: outcome(policy, reused, ttft_s) for policy, reused, ttft_s in (
        ("kv", 500, 0.1), ("a", 600, 0.05), ("b", 100, 0.2), (POOLED, 600, 0.0), (ENDLESS, 800, 0.0)
    )}  # fmt: skip
    report = report_values({(SEED, 0, False): runs, (SEED, 1, False): {"kv": runs["kv"]}}, "kv", ("a", "b"))
    assert report.rows["all"].shapes == 1 and report.rows["all"].ahead == 1 and report.differ == 1
    assert [shape.name for shape in report.worse] == [draw(SEED, 0).name] and report.worse[0].verdict.ahead == ("a",)
