# SPDX-License-Identifier: Apache-2.0
"""Pure parts of `make bench-peers`: ratios, goals, the table, a router's capacity, and llm-d's keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.llm_d import JSON_FIELDS, TIER_FIELDS, commands
from benchmarks.peers.packages import reason
from benchmarks.peers.samples import Samples, capacity
from benchmarks.peers.table import OURS, Group, PeerRow, latency_rows, page_part, peer_row, table
from benchmarks.report import END, write_part


def cells(row: PeerRow) -> list[str]:
    """Return the cells of the row in the table."""
    return [cell.strip() for cell in table([row]).splitlines()[2].strip("|").split("|")]


def test_a_ratio_above_one_means_that_this_router_is_ahead() -> None:
    values = {OURS: [100.0, 300.0, 200.0], "peer": [500.0, 100.0, 300.0]}
    time, rate = peer_row("a", "us", "peer", values), peer_row("a", "1/s", "peer", values, more=True)
    assert (time.ratio, rate.ratio) == (1.5, pytest.approx(2 / 3))
    assert time.met is None


@pytest.mark.parametrize(("goal", "met", "word"), [(1.5, True, "yes"), (1.51, False, "**no**"), (None, None, "")])
def test_a_goal_is_the_lowest_allowed_ratio(goal: float | None, met: bool | None, word: str) -> None:
    row = peer_row("a", "us", "peer", {OURS: [2.0], "peer": [3.0]}, goal=goal)
    assert row.met is met
    assert cells(row) == ["a", "us", "2.00", "3.00", "peer", "1.50", "" if goal is None else f"{goal:g}", word]


def test_a_missing_peer_is_named_with_the_reason() -> None:
    row = peer_row("a", "us", "dynamo.indexer", {OURS: [2.0]}, goal=1.5, problem="no wheel for this machine")
    assert row.ratio is None
    assert cells(row)[3:] == ["not measured: no wheel for this machine", "dynamo.indexer", "-", "1.5", "unknown"]


@pytest.mark.parametrize("ours", [0.0, -3.0])
def test_figures_within_the_noise_have_no_ratio(ours: float) -> None:
    assert peer_row("a", "us", "peer", {OURS: [ours], "peer": [3.0]}, goal=1.0).met is None


def test_latencies_are_taken_by_round_and_only_the_median_has_the_goal() -> None:
    samples = Samples()
    for slowest in (10.0, 20.0, 90.0):
        samples.add("idle", OURS, np.array([*[1.0] * 50, *[slowest] * 50]), 0.001)
    p50, p99 = latency_rows("a", "peer", samples.taken["idle"], goal=1.5)
    assert (p50.what, p50.goal, p99.what, p99.goal) == ("a, p50", 1.5, "a, p99", None)
    assert p99.ours == [10.0, 20.0, 90.0]
    assert samples.cpu["idle"][OURS] == [10.0] * 3


def test_the_page_names_each_machine_once() -> None:
    machine, other_machine = {"cpu": "x", "date": "1"}, {"cpu": "x", "date": "2"}
    row = PeerRow("a", "us", "peer", [1.0], [2.0])
    part = page_part(
        {"query": Group(machine, [row], ["n"]), "select": Group(machine, [row]), "proxy": Group(other_machine, [row])}
    )
    assert "- query: n" in part
    assert part.count("Machine of") == 2 and "Machine of query, select: cpu: x; date: 1." in part


def test_a_page_keeps_what_is_around_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- x -->\nold\n{END}\nafter\n")
    write_part(page, "<!-- x -->", f"| {'w' * 200} |\n\n- {'long ' * 40}")
    text = page.read_text()
    assert text.startswith("before\n<!-- x -->\n\n| www") and text.endswith(f"\n\n{END}\nafter\n") and "old" not in text
    assert f"| {'w' * 200} |" in text
    assert all(line.startswith("|") or len(line) <= 120 for line in text.splitlines())
    with pytest.raises(SystemExit, match="lacks the markers"):
        write_part(page, "<!-- y -->", "")


@pytest.mark.parametrize(
    ("used_s", "expected"),
    [
        # One process is the limit; Valkey beside it is not.
        ({1: 0.5, 2: 0.1}, 2_000.0),
        # Two processes share the work.
        ({1: 0.5, 2: 0.5}, 2_000.0),
        # All processes together need more than two cores can do.
        ({1: 0.5, 2: 0.5, 3: 0.5}, 1_000 / 0.75),
    ],
)
def test_throughput_is_bounded_by_the_busiest_process_and_by_the_cores(
    used_s: dict[int, float], expected: float
) -> None:
    assert capacity(1_000, used_s) == pytest.approx(expected)


def test_the_reason_of_a_failed_installation_fits_a_table_cell() -> None:
    output = "WARNING: Location '/x' is ignored\nERROR: Could not find a version | of x\n\nERROR: No match | for x==1\n"
    assert reason(output) == "No match / for x==1"
    assert reason("") == "no reason given"


@pytest.mark.parametrize(
    ("layout", "lead", "field"),
    [
        (TIER_FIELDS, [b"SET", b"engine:7", b"9"], b"10.0.0.3:8000@gpu"),
        (JSON_FIELDS, [b"ZADD", b"engine:7", b"0", b"9"], b'"PodIdentifier":"10.0.0.3:8000","DeviceTier":"gpu"'),
    ],
)
def test_the_layout_of_llm_d_has_two_keys_a_block(layout: str, lead: list[bytes], field: bytes) -> None:
    first, second, *others = commands(layout, "10.0.0.3:8000", [7, 8], [9, 10])
    assert first.split(b"\r\n")[2::2] == [*lead]
    name, key, pod, value = second.split(b"\r\n")[2::2]
    assert (name, key, value) == (b"HSET", b"9", b"") and field in pod
    assert len(others) == 2
