# SPDX-License-Identifier: Apache-2.0
"""Each API key's share of the writes into the caches, and the extra price for a key above its fair share."""

from __future__ import annotations

import random

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.load.key_shares import EXCESS_MAX, EXCESS_PRICE, KeyShares

A, B = WorkerKey("m", "a"), WorkerKey("m", "b")


def test_one_key_alone_and_keys_that_write_alike_pay_what_is_usual() -> None:
    shares = KeyShares()
    for _ in range(10):
        shares.wrote("", A, 1_000, 0.0)
    shares.wrote("one", A, 1, 0.0)
    # Prompts without a key belong to somebody, but nobody knows to whom.
    assert shares.share("") is None and shares.share("never seen") is None
    alone = KeyShares()
    alone.wrote("one", A, 1_000, 0.0)
    assert alone.share("one") is None
    alike = KeyShares()
    for key in ("one", "two", "three"):
        alike.wrote(key, A, 500, 0.0)
    assert [alike.share(key) for key in ("one", "two", "three")] == [None] * 3


def test_a_key_that_holds_twice_its_fair_part_pays_for_the_blocks_of_others_alone() -> None:
    shares = KeyShares()
    for key, worker, tokens in (("much", A, 900), ("little", A, 100), ("little", B, 100), ("less", B, 100)):
        shares.wrote(key, worker, tokens, 0.0)
    assert shares.share("little") is None and shares.share("less") is None
    share = shares.share("much")
    assert share is not None and share.excess == pytest.approx(900 / 1_200 * 3)
    full_price = 1 + EXCESS_PRICE * (share.excess - 1)
    # Nine tenths of the tokens that were written to A belong to this key.
    assert share.price(A) == pytest.approx(0.1 * full_price)
    assert share.price(B) == share.price(WorkerKey("m", "new")) == pytest.approx(full_price)


def test_the_price_rises_from_the_usual_one_with_what_is_held() -> None:
    prices = []
    for tokens in range(100, 5_000, 50):
        shares = KeyShares()
        shares.wrote("this", A, tokens, 0.0)
        for other in range(6):
            shares.wrote(f"other {other}", B, 100, 0.0)
        share = shares.share("this")
        prices.append(1.0 if share is None else share.price(B))
    assert prices[0] == 1.0 and prices == sorted(prices)
    assert prices[-1] == prices[-20] == pytest.approx(1 + EXCESS_PRICE * (EXCESS_MAX - 1))


def test_a_key_among_many_small_ones_pays_up_to_a_bound_and_the_small_ones_never() -> None:
    shares = KeyShares()
    shares.wrote("large", A, 8_000, 0.0)
    for number in range(200):
        shares.wrote(f"small {number}", B, 10, 0.0)
    shares.wrote("small 7", B, 90, 0.0)
    large = shares.share("large")
    assert large is not None and large.excess == EXCESS_MAX and shares.share("small 7") is None


def test_old_writes_no_longer_count() -> None:
    shares = KeyShares()
    shares.wrote("burst", A, 1_000_000, 0.0)
    shares.wrote("steady", A, 10_000, 0.0)
    assert shares.share("burst") is not None
    for writings in range(1, 100):
        for key in ("steady", "another"):
            shares.wrote(key, B, 100, float(writings))
    assert shares.share("burst") is None


def test_counting_restarts_after_a_pause() -> None:
    """The model's last worker left, and another worker joined."""
    shares = KeyShares()
    for key, tokens in (("before", 9_000), ("other", 1_000)):
        shares.wrote(key, A, tokens, 100.0)
    assert shares.share("before") is not None
    for key, tokens in (("after", 9_000), ("before", 1_000)):
        shares.wrote(key, B, tokens, 0.0)
    after = shares.share("after")
    assert shares.share("before") is None and after is not None and after.excess == pytest.approx(1.8)


def check_sums(shares: KeyShares) -> None:
    by_key = {key: sum(tokens.values()) for key, tokens in shares._tokens.items()}
    assert shares._by_key == pytest.approx(by_key) and shares._total == pytest.approx(sum(by_key.values()))
    by_worker = {worker: 0.0 for tokens in shares._tokens.values() for worker in tokens}
    for tokens in shares._tokens.values():
        for worker, count in tokens.items():
            by_worker[worker] += count
    kept = {worker: count for worker, count in shares._by_worker.items() if worker in by_worker}
    assert kept == pytest.approx(by_worker, rel=1e-6)


def test_memory_is_bounded_and_the_sums_are_those_of_what_is_kept() -> None:
    rng = random.Random(1)
    shares = KeyShares(max_keys=8)
    writings = 0.0
    for step in range(5_000):
        writings += rng.random() / 10
        workers = [WorkerKey("m", f"w{number}") for number in range(step // 100, step // 100 + 10)]
        shares.wrote(f"k{rng.randrange(20)}", rng.choice(workers), rng.randrange(2_000), writings)
        assert len(shares._tokens) <= 8
        if step % 50 == 0:
            shares.keep(workers)
            assert shares._by_worker.keys() <= set(workers)
            check_sums(shares)
    shares.keep([])
    assert not shares._tokens and not shares._by_worker and not shares._total
