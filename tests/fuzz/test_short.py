# SPDX-License-Identifier: Apache-2.0
"""The short part of `make fuzz`: the same targets and mutations without coverage guidance, with a fixed seed."""

from __future__ import annotations

import importlib

import pytest

from kvrouter.router.index.ingest.residency import Residency
from tests.fuzz.plain_fuzz import fuzz
from tests.fuzz.script import pack, unpack

# Inputs by target; each target takes some seconds.
INPUTS = {"payload_target": 50_000, "stock_target": 1_500, "report_target": 4_000}
SEED = 20_261


@pytest.mark.parametrize("name", list(INPUTS))
def test_nothing_that_comes_over_the_wire_raises_or_miscounts(name: str) -> None:
    fuzz(name, INPUTS[name], SEED)


def test_a_miscount_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the counting of removals, and check that the recount notices it."""
    monkeypatch.setattr(Residency, "remove_copies", lambda *_: None)
    with pytest.raises(AssertionError, match="differ from a recount"):
        fuzz("stock_target", 0, SEED)


@pytest.mark.parametrize("name", list(INPUTS))
def test_no_story_of_the_corpus_is_cut(name: str) -> None:
    for data in importlib.import_module(f"tests.fuzz.{name}").corpus():
        assert pack(unpack(data)) == data
