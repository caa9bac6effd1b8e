# SPDX-License-Identifier: Apache-2.0
"""Whatever requests come, no worker reuses more than any worker held, nor does this router's choice; and sums add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.shadow.observation import Outcome, Unjudged
from kvrouter.shadow.tally import OTHERS, Tally
from kvrouter.shadow.verdict import Snapshot, Verdict, judge
from kvrouter.shadow.worker_names import FleetNames, fleet_names

IDS = ("w0", "w1", "w2")
FLEET: FleetNames = fleet_names(
    [
        {"worker_id": name, "dp_rank": rank, "model": "m", "url": f"http://10.0.0.{number}:8000"}
        for number, name in enumerate(IDS)
        for rank in (0, 1)
    ]
)
RANKS = [f"{name}{rank}" for name in IDS for rank in ("", "@1")]
BLOCK_TOKENS = 16


@st.composite
def requests(draw: st.DrawFn) -> tuple[Snapshot, Outcome]:
    num_tokens = draw(st.integers(1, 400))
    hits = st.integers(0, num_tokens)
    held = draw(st.dictionaries(st.sampled_from(RANKS), hits))
    snapshot = Snapshot(num_tokens, BLOCK_TOKENS, held, draw(st.sampled_from(RANKS)), is_before=draw(st.booleans()))
    names = st.sampled_from([*IDS, *RANKS, "10.0.0.1:8000", "http://10.0.0.2:8000/v1", "elsewhere", ""])
    cached = draw(st.none() | st.integers(0, num_tokens + 20))
    return snapshot, Outcome(draw(st.none() | names), cached, draw(st.sampled_from([None, num_tokens, num_tokens + 1])))


@given(st.lists(requests(), max_size=30), st.integers(1, 8))
def test_what_is_reused_was_there_and_sums_are_sums(some: list[tuple[Snapshot, Outcome]], max_workers: int) -> None:
    tally = Tally(max_workers)
    verdicts: list[Verdict] = []
    for snapshot, outcome in some:
        try:
            verdict = judge(snapshot, outcome, FLEET)
        except Unjudged as problem:
            tally.skip(problem.reason, problem.detail)
            continue
        assert 0 <= verdict.there <= snapshot.num_tokens
        assert verdict.reused is None or 0 <= verdict.reused <= verdict.there
        assert verdict.ours is None or 0 <= verdict.ours <= verdict.there
        assert (verdict.worker is None) == (verdict.reused is None)
        if outcome.cached_tokens is not None:
            assert verdict.is_reported and verdict.reused == outcome.cached_tokens
        verdicts.append(verdict)
        tally.count(verdict)
    report = tally.report(1.0)
    assert report.judged_requests == len(verdicts) and report.skipped_requests == len(some) - len(verdicts)
    placed = [verdict_ for verdict_ in verdicts if verdict_.reused is not None]
    reused, there = sum(verdict_.reused or 0 for verdict_ in placed), sum(verdict_.there for verdict_ in placed)
    assert (report.placed.reused_tokens, report.placed.there_tokens) == (reused, there)
    assert sum(row.reused_tokens for row in report.workers) == reused
    lost = sum(row.lost_tokens for row in report.workers)
    assert lost == sum(row.unused_tokens for row in report.workers) == there - reused
    assert sum(row.held_tokens for row in report.workers) == sum(sum(verdict_.held.values()) for verdict_ in verdicts)
    assert report.unplaced.there_tokens == sum(verdict_.there for verdict_ in verdicts if verdict_.reused is None)
    assert len([row for row in report.workers if row.worker != OTHERS]) <= max_workers
