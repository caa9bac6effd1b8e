# SPDX-License-Identifier: Apache-2.0
"""From SGLang's own events, the router promises nothing that SGLang would not reuse, in any layout.

For full attention alone, registered as such, it promises exactly the tokens that SGLang reuses.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import KVEventBatch

from kvrouter.events.vllm.stream_items import Connected
from tests.sglang.stock_predictor import StockPredictor, full_attention, positional
from tests.sglang.tree_layouts import LAYOUTS, TreeLayout
from tests.sglang.tree_oracle import TreeOracle

# Questions of each layout; 200 make over 6,000 in all.
PROBES = int(os.environ.get("KVROUTER_TEST_SGLANG_STOCK_PROBES", "60"))
STEPS_PER_PROBE = 2
LEAST_NON_ZERO = 0.3

FORMS: dict[str, Callable[[list[Any]], list[Any]]] = {"maps": list, "arrays": positional}

_encoder = msgspec.msgpack.Encoder()


def followed(oracle: TreeOracle, form: str, group_idx: int | None = None) -> StockPredictor:
    """Return a predictor that receives the oracle's events, as SGLang's publisher writes them.

    Args:
        oracle: The cache that publishes.
        form: The form of an event; see `FORMS`.
        group_idx: The registered number of the only group.
    """
    is_stated = oracle.layout.components == ("FULL",)
    catalog = None
    if is_stated:
        catalog = full_attention(oracle.layout.page, group_idx)
    predictor = StockPredictor(catalog)
    predictor.take(Connected())
    seqs = iter(range(1 << 30))

    def publish(events: list[Any]) -> None:
        batch = KVEventBatch(ts=1.0, events=FORMS[form](events), attn_dp_rank=0)
        predictor.take_payload(next(seqs), _encoder.encode(batch))

    oracle.publish = publish
    return predictor


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nothing_is_promised_that_is_not_there(layout: TreeLayout, form: str, seed: int) -> None:
    oracle = TreeOracle(layout, Random(f"{layout.name} {seed}"))
    ask(oracle, followed(oracle, form))


@pytest.mark.parametrize("group_idx", [0, 3])
@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.components == ("FULL",)], ids=lambda layout: layout.name
)
def test_the_registered_group_may_have_any_number(layout: TreeLayout, group_idx: int, seed: int) -> None:
    """Register the only group under a number, although SGLang's events give it none."""
    oracle = TreeOracle(layout, Random(f"{layout.name} {seed}"))
    ask(oracle, followed(oracle, "maps", group_idx))


def ask(oracle: TreeOracle, predictor: StockPredictor) -> None:
    """Compare predictions with the reuse of the cache."""
    layout = oracle.layout
    counts: Counter[str] = Counter()
    wrong = []
    for _ in range(40):
        oracle.step()
    for _ in range(PROBES):
        for _ in range(STEPS_PER_PROBE):
            oracle.step()
        prompt = oracle.prompt()
        predicted = predictor.hit(prompt).on_gpu
        reused = oracle.reused(prompt)
        oracle.end_step()
        counts["non-zero"] += reused > 0
        # SGLang's events do not show which adapter a hash belongs to, so prompts with an adapter earn no credit.
        is_exact = layout.components == ("FULL",) and prompt.lora is None
        if predicted != (reused if is_exact else 0):
            wrong.append((len(prompt.tokens), prompt.lora, predicted, reused))
    assert not wrong, f"{len(wrong)} of {PROBES} wrong: {wrong[:8]}"
    assert counts["non-zero"] >= LEAST_NON_ZERO * PROBES
    if layout.components != ("FULL",):
        assert "load the engine patch" in predictor.why_not
