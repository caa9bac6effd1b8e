# SPDX-License-Identifier: Apache-2.0
"""With HiCache, the router predicts the match of SGLang's tree over device and host, and host evictions are reported.

Here blocks are put on the host as SGLang's own kit of fixtures does it, without a transfer, so that Mamba states go
there too; `test_host_server.py` covers SGLang's controller and load-backs.
"""

from __future__ import annotations

import logging
from random import Random

import pytest

from kvrouter.engine_patch.setup.features import Features
from kvrouter.engine_patch.sglang.tree_residency import HOST
from kvrouter.engine_patch.sglang.tree_tap import FEATURES, TreeTap
from tests.sglang.tree_layouts import LAYOUTS, TreeLayout
from tests.sglang.tree_oracle import TreeOracle
from tests.sglang.tree_predictor import TreePredictor

PROBES = 350
NAMES = ("full-1", "full-16", "swa-1-4", "swa-16-17", "swa-16-40", "mamba-16")
# Matches that continue beyond the device; windows and states rarely allow that.
MIN_ON_HOST = 10
# With full attention alone, SGLang loads back no fewer tokens than these (unified_radix_cache.py:576).
LOAD_BACK_TOKENS = 10


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.name in NAMES], ids=lambda layout: layout.name
)
def test_every_match_over_both_tiers_is_predicted(layout: TreeLayout, seed: int) -> None:
    rng = Random(f"{layout.name} {seed}")
    oracle = TreeOracle(layout, rng, has_host=True)
    predictor = TreePredictor()
    oracle.tap = TreeTap(oracle.cache, predictor, Features(logging.getLogger("test"), FEATURES))
    assert oracle.tap.attach(0, "test", "m")
    on_host, evicted, wrong = 0, False, []
    for _ in range(PROBES):
        before = sum(len(hashes) for place, hashes in predictor.held.items() if place.medium == HOST)
        oracle.step()
        evicted |= sum(len(hashes) for place, hashes in predictor.held.items() if place.medium == HOST) < before
        prompt = oracle.prompt()
        hit = predictor.hit(*prompt)
        device, both = oracle.matched(prompt)
        oracle.end_step()
        if both - device < LOAD_BACK_TOKENS and layout.components == ("FULL",):
            # SGLang does not load so few tokens.
            both = device
        on_host += both > device
        if hit.by_tier[:2] != (device, both):
            wrong.append((len(prompt.tokens), hit.on_gpu, hit.by_tier[1], device, both))
    assert not wrong, f"{len(wrong)} of {PROBES} wrong: {wrong[:6]}"
    assert evicted and on_host >= MIN_ON_HOST
