# SPDX-License-Identifier: Apache-2.0
"""From the patch's reports, the router predicts the reuse of SGLang's radix cache, token for token.

This holds for every layout of components, while everything is evicted all the time.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from random import Random

import pytest

from kvrouter.engine_patch.setup.features import Features
from kvrouter.engine_patch.sglang.tree_tap import FEATURES, TreeTap
from tests.sglang.tree_layouts import LAYOUTS, NAMESPACED, TreeLayout
from tests.sglang.tree_oracle import TreeOracle
from tests.sglang.tree_predictor import TreePredictor
from tests.support.examples import many

# Questions of each layout; 700 make over 20,000 in all.
PROBES = int(os.environ.get("KVROUTER_TEST_SGLANG_PROBES", "150"))
STEPS_PER_PROBE = 2
# The cores of SGLang's radix cache; Rust is its default.
CORES = ("python", "rust")
# The most insertions, matches and evictions in one step: a known node may be split several times in one step, and an
# inserted one may be gone again at its end.
MOST_ACTIONS = 8
LEAST_NON_ZERO = 0.3
# Questions of each hybrid layout, and the least share of them that full attention alone gets wrong.
ALONE_PROBES, LEAST_MISLED = 300 if many() else 100, 0.1


def followed(oracle: TreeOracle) -> TreePredictor:
    """Return a predictor that the patch reports to."""
    predictor = TreePredictor()
    oracle.tap = TreeTap(oracle.cache, predictor, Features(logging.getLogger("test"), FEATURES))
    assert oracle.tap.attach(0, "test", "m")
    return predictor


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_hit_is_predicted(layout: TreeLayout, core: str, seed: int) -> None:
    ask(TreeOracle(layout, Random(f"{layout.name} {seed}"), core=core))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("layout", [*NAMESPACED, *LAYOUTS], ids=lambda layout: layout.name)
def test_every_hit_is_predicted_after_steps_of_many_changes(layout: TreeLayout, core: str, seed: int) -> None:
    ask(TreeOracle(layout, Random(f"{layout.name} {seed} many"), core=core, most_actions=MOST_ACTIONS))


def ask(oracle: TreeOracle) -> None:
    """Compare predictions with the reuse of the cache, between steps."""
    predictor = followed(oracle)
    non_zero, wrong = 0, []
    for _ in range(40):
        oracle.step()
    for _ in range(PROBES):
        for _ in range(STEPS_PER_PROBE):
            oracle.step()
        prompt = oracle.prompt()
        predicted = predictor.hit(*prompt).on_gpu
        reused = oracle.reused(prompt)
        oracle.end_step()
        non_zero += reused > 0
        if predicted != reused:
            wrong.append((len(prompt.tokens), predicted, reused))
    assert not wrong, f"{len(wrong)} of {PROBES} wrong: {wrong[:8]}"
    assert non_zero >= LEAST_NON_ZERO * PROBES, f"only {non_zero} of {PROBES} reuse anything: nothing is shown"
    assert predictor.removed and not predictor.withheld


def test_full_attention_alone_is_often_wrong(seed: int) -> None:
    """Predict from full attention alone, as a router would that follows SGLang's own events."""
    wrong: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    for layout in LAYOUTS:
        if len(layout.components) == 1:
            continue
        kinds = "+".join(layout.components)
        oracle = TreeOracle(layout, Random(f"{layout.name} {seed}"))
        predictor = followed(oracle)
        for _ in range(40):
            oracle.step()
        for _ in range(ALONE_PROBES):
            for _ in range(STEPS_PER_PROBE):
                oracle.step()
            prompt = oracle.prompt()
            wrong[kinds] += predictor.hit(*prompt, alone=True).on_gpu != oracle.reused(prompt)
            probes[kinds] += 1
            oracle.end_step()
    print("\nfull attention alone:", ", ".join(f"{kinds} {wrong[kinds]} of {probes[kinds]} wrong" for kinds in probes))
    assert all(wrong.values()) and wrong.total() >= LEAST_MISLED * probes.total()
