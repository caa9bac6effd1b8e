# SPDX-License-Identifier: Apache-2.0
"""The measured share of time in which workers compute prompts."""

from __future__ import annotations

import pytest

from kvrouter.router.route.load.busy_share import BUSY_MAX, BUSY_NOW_MAX, SPAN_S, BusyShare


def test_the_share_follows_the_load_within_its_span() -> None:
    busy = BusyShare()
    assert busy.at_least(0.0) == 0
    busy.observe(1.0, 5.0)
    assert busy.at_least(0.0) == 0
    for second in range(6, 6 + 10 * int(SPAN_S)):
        busy.observe(0.5, float(second))
    assert busy.at_least(0.0) == pytest.approx(0.5, abs=0.01)
    busy.observe(0.0, 6 + 20 * SPAN_S)
    assert busy.at_least(0.0) < 0.01


def test_the_share_is_bounded_so_that_the_queueing_term_stays_finite() -> None:
    busy = BusyShare()
    for second in range(1_000):
        busy.observe(1.0, float(second))
    assert busy.at_least(1.0) == BUSY_MAX


def test_a_burst_counts_before_the_mean_has_noticed_it() -> None:
    busy = BusyShare()
    assert busy.at_least(0.25) == 0.25 and busy.at_least(1.0) == BUSY_NOW_MAX
