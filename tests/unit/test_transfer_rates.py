# SPDX-License-Identifier: Apache-2.0
"""The speed of transfers between hosts, as measured by the fetches that go there."""

from __future__ import annotations

import pytest

from kvrouter.router.route.load.transfer_rates import (
    ASSUMED_BYTES_PER_S,
    MEASURED_TTL_S,
    PRIOR_FETCHES,
    UNKNOWN_TOKEN_COST,
    HostPair,
    TransferRates,
)
from kvrouter.router.route.load.worker_speed import LOADED_TOKENS_MIN, SAMPLES_MIN

HERE, THERE, INSIDE = HostPair("m", "a", "b"), HostPair("m", "b", "a"), HostPair("m", "a", "a")
BYTES, PREFILL_RATE = 125_000, 10_000.0
ASSUMED = (BYTES / ASSUMED_BYTES_PER_S, 0.0)


def rate(rates: TransferRates, pair: HostPair) -> tuple[float, float]:
    return rates.rate(pair, BYTES, PREFILL_RATE)


def learned(pair: HostPair, *token_s: float, tokens: int = 4_000) -> TransferRates:
    rates = TransferRates()
    for seconds in token_s:
        rates.learn(pair, tokens, 0, seconds, 0.0)
    return rates


def test_a_rate_is_assumed_before_any_measurement() -> None:
    assert rate(TransferRates(), HERE) == ASSUMED
    unknown = TransferRates().rate(HERE, 0, PREFILL_RATE)
    assert unknown[0] * PREFILL_RATE == pytest.approx(UNKNOWN_TOKEN_COST)


def test_each_pair_of_hosts_has_its_own_rate() -> None:
    rates = learned(HERE, *[1e-4] * SAMPLES_MIN)
    for _ in range(SAMPLES_MIN):
        rates.learn(THERE, 4_000, 0, 5e-4, 0.0)
        rates.learn(INSIDE, 4_000, 0, 1e-6, 0.0)
    assert [rate(rates, pair)[0] for pair in (HERE, THERE, INSIDE)] == [1e-4, 5e-4, 1e-6]
    assert rate(rates, HostPair("other", "a", "b")) == ASSUMED


def test_a_known_rate_changes_with_the_next_measurement() -> None:
    rates = learned(HERE, *[1e-4] * (SAMPLES_MIN - 1))
    assert rate(rates, HERE) == ASSUMED
    rates.learn(HERE, 4_000, 0, 1e-4, 0.0)
    assert rates.known_rates("m", "a")["b"][0] == 1e-4


def test_a_single_wrong_measurement_changes_nothing() -> None:
    assert rate(learned(HERE, 1e-4, 1e-4, 1.0, 1e-4), HERE)[0] == 1e-4


def test_short_fetches_and_those_of_unknown_time_say_nothing_about_the_rate() -> None:
    assert rate(learned(HERE, *[1e-2] * 8, tokens=LOADED_TOKENS_MIN - 1), HERE) == ASSUMED
    rates = TransferRates()
    for _ in range(8):
        rates.learn(HERE, 4_000, 0, None, 0.0)
    assert rate(rates, HERE) == ASSUMED


def test_an_unmeasured_pair_is_as_fast_as_the_others_between_hosts() -> None:
    rates = learned(HERE, *[1e-4] * SAMPLES_MIN)
    assert rate(rates, HostPair("m", "c", "d"))[0] == 1e-4
    assert rate(rates, INSIDE) == ASSUMED


def test_fetches_that_fall_short_are_remembered_apart_from_the_rate() -> None:
    rates = learned(HERE, *[1e-4] * SAMPLES_MIN)
    rates.learn(HERE, 4_000, 4_000, None, 0.0)
    number = SAMPLES_MIN + 1
    assert rate(rates, HERE)[0] == 1e-4
    assert rate(rates, HERE)[1] == pytest.approx(1 / (number + PRIOR_FETCHES))
    for _ in range(100):
        rates.learn(HERE, 4_000, 4_000, None, 0.0)
    assert 0.75 < rate(rates, HERE)[1] < 1


def test_measurements_are_forgotten_after_a_while() -> None:
    rates = learned(HERE, *[1e-2] * SAMPLES_MIN)
    rates.tick(MEASURED_TTL_S)
    assert rate(rates, HERE)[0] == 1e-2
    rates.tick(MEASURED_TTL_S + 1)
    assert rate(rates, HERE) == ASSUMED and not len(rates)


def test_the_pairs_are_bounded_and_the_one_measured_least_lately_goes_first() -> None:
    rates = TransferRates(max_pairs=2)
    pairs = [HostPair("m", name, "z") for name in "abc"]
    for pair, token_s in zip(pairs, (1e-4, 2e-4, 3e-4), strict=True):
        for _ in range(SAMPLES_MIN):
            rates.learn(pair, 4_000, 0, token_s, 0.0)
    assert len(rates) == 2
    # The first pair has the median of all pairs.
    assert [rate(rates, pair)[0] for pair in pairs] == [2e-4, 2e-4, 3e-4]
    for number in range(100):
        rate(rates, HostPair("m", f"x{number}", "z"))
        assert sum(len(rates.known_rates("m", f"x{known}")) for known in range(number + 1)) <= 2
