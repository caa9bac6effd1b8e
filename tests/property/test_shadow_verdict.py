# SPDX-License-Identifier: Apache-2.0
"""A shadow's verdicts: nothing is reused or chosen beyond what was there, and totals are the sums of the rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.shadow.observation import Outcome, Unjudged
from kvrouter.router.shadow.tally import Tally
from kvrouter.router.shadow.verdict import Snapshot, judge
from kvrouter.router.shadow.worker_names import fleet_names

FLEET = fleet_names({"worker_id": f"w{n}", "dp_rank": 0, "model": "m", "url": f"http://h:{n + 1}"} for n in range(3))
NAMES = st.sampled_from(["w0", "w1", "w2"])
SNAPSHOTS = st.builds(
    Snapshot, st.just(100), st.just(16), st.dictionaries(NAMES, st.integers(0, 99)), NAMES, is_before=st.booleans()
)
OUTCOMES = st.builds(
    Outcome, st.one_of(st.none(), NAMES, st.just("h:2"), st.just("x")), st.one_of(st.none(), st.integers(0, 110))
)


@given(st.lists(st.tuples(SNAPSHOTS, OUTCOMES), max_size=20))
def test_the_law_holds_and_totals_are_sums(pairs: list[tuple[Snapshot, Outcome]]) -> None:
    tally = Tally()
    for snapshot, outcome in pairs:
        try:
            verdict = judge(snapshot, outcome, FLEET)
        except Unjudged as problem:
            tally.skip(problem.reason)
            continue
        assert (verdict.reused or 0) <= verdict.there and (verdict.ours or 0) <= verdict.there
        tally.count(verdict)
    report = tally.report(1.0)
    assert report.judged_requests + report.skipped_requests == len(pairs)
    assert sum(row.reused_tokens for row in report.workers) == report.placed.reused_tokens
    lost = report.placed.there_tokens - report.placed.reused_tokens
    assert sum(row.lost_tokens for row in report.workers) == lost == sum(row.unused_tokens for row in report.workers)
