# SPDX-License-Identifier: Apache-2.0
"""How much each API key wrote into the caches, and what more one pays that holds more than its fair part."""

from __future__ import annotations

import random

import pytest

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.load.key_shares import EXCESS_PRICE, KeyShares

A, B = WorkerKey("m", "a"), WorkerKey("m", "b")


def test_one_key_alone_and_keys_that_write_alike_pay_what_is_usual() -> None:
    shares = KeyShares()
    for _ in range(10):
        shares.wrote("", A, 1_000, 0.0)
    assert shares.share("") is None and shares.share("never seen") is None
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
    others = 1 + EXCESS_PRICE * (share.excess - 1)
    # Nine tenths of what was written to a are its own.
    assert share.price(A) == pytest.approx(0.1 * others)
    assert share.price(B) == share.price(WorkerKey("m", "new")) == pytest.approx(others)


def test_the_price_rises_from_the_usual_one_with_what_is_held() -> None:
    prices = []
    for tokens in range(100, 1_000, 50):
        shares = KeyShares()
        for key, worker, count in (("this", A, tokens), ("other", A, 100), ("other", B, 1), ("third", B, 99)):
            shares.wrote(key, worker, count, 0.0)
        share = shares.share("this")
        prices.append(1.0 if share is None else share.price(B))
    assert prices[0] == 1.0 and prices == sorted(prices) and prices[-1] > 10


def test_what_was_written_long_ago_counts_no_longer() -> None:
    shares = KeyShares()
    shares.wrote("burst", A, 1_000_000, 0.0)
    shares.wrote("steady", A, 10_000, 0.0)
    assert shares.share("burst") is not None
    for writings in range(1, 100):
        for key in ("steady", "another"):
            shares.wrote(key, B, 100, float(writings))
    assert shares.share("burst") is None and len(shares) == 2


def test_memory_is_bounded_and_the_sums_are_those_of_what_is_kept() -> None:
    rng = random.Random(1)
    shares = KeyShares(max_keys=8)
    writings = 0.0
    for _ in range(5_000):
        writings += rng.random() / 10
        shares.wrote(f"k{rng.randrange(20)}", WorkerKey("m", f"w{rng.randrange(50)}"), rng.randrange(2_000), writings)
        assert len(shares) <= 8
    by_key = {key: sum(tokens.values()) for key, tokens in shares._tokens.items()}
    assert shares._by_key == pytest.approx(by_key) and shares._total == pytest.approx(sum(by_key.values()))
    assert sum(shares._by_worker.values()) == pytest.approx(shares._total)
