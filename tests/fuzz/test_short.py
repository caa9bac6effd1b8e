# SPDX-License-Identifier: Apache-2.0
"""The short part of `make fuzz`: the same targets and changes without coverage guidance, at a fixed seed."""

from __future__ import annotations

import importlib
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# pytest's importlib mode leaves sys.path alone.
from script import mutated, pack, unpack

from kvrouter.router.ingest.residency import Residency

# Some seconds each.
INPUTS = {"payload_target": 50_000, "stock_target": 1_500, "report_target": 4_000}
SEED = 20_261
# Changed inputs from which others are made, so that changes add up.
POOL = 400
HANG_S = 20


@contextmanager
def watched(named: Callable[[], str]) -> Iterator[None]:
    """Fails, and names the input, when the block takes far longer than all inputs together should."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"hangs on {named()}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANG_S * 3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(name: str, inputs: int) -> None:
    target = importlib.import_module(name)
    corpus = target.corpus()
    rng = random.Random(SEED)
    pool = list(corpus)
    data = b""
    with watched(lambda: data.hex()):
        for data in corpus:
            target.run(data)
        for _ in range(inputs):
            data = mutated(rng.choice(pool), rng, corpus)
            try:
                target.run(data)
            except Exception as error:
                raise AssertionError(f"{name}, seed {SEED}: {error!r} on the input {data.hex()}") from error
            if len(pool) < POOL:
                pool.append(data)
            elif rng.random() < 0.1:
                pool[rng.randrange(len(corpus), POOL)] = data


@pytest.mark.parametrize("name", list(INPUTS))
def test_nothing_that_comes_over_the_wire_raises_or_miscounts(name: str) -> None:
    fuzz(name, INPUTS[name])


def test_a_miscount_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the recount would be a decoration."""
    monkeypatch.setattr(Residency, "remove_copies", lambda *_: None)
    with pytest.raises(AssertionError, match="differ from a recount"):
        fuzz("stock_target", 0)


@pytest.mark.parametrize("name", list(INPUTS))
def test_no_story_of_the_corpus_is_cut(name: str) -> None:
    for data in importlib.import_module(name).corpus():
        assert pack(unpack(data)) == data
