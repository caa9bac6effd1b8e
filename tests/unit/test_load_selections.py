# SPDX-License-Identifier: Apache-2.0
"""Selections that are not reserved yet: kept for a while, and bounded in number."""

from __future__ import annotations

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.load.prefix_tree import PromptPrefixes
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.selections import Selected, Selections


def selected(expiry_s: float, worker_id: str = "w0") -> Selected:
    hit = Hit(WorkerKey("m", worker_id), all_on_gpu(0), "live", "")
    return Selected("m", Choice(hit, None, "", None), PromptPrefixes([]), 10, None, expiry_s)


def test_a_selection_is_found_until_it_expires() -> None:
    selections = Selections()
    selections.keep("a", selected(10.0))
    selections.keep("b", selected(20.0))
    assert (
        selections.find("a", 9.9) is not None
        and selections.find("a", 10.0) is None
        and selections.find("none", 0.0) is None
    )
    selections.expire(10.0)
    assert len(selections) == 1 and selections.find("b", 10.0) is not None


def test_a_later_selection_of_the_same_id_replaces_the_first() -> None:
    selections = Selections()
    selections.keep("a", selected(10.0, "w0"))
    selections.keep("a", selected(10.0, "w1"))
    selection = selections.find("a", 0.0)
    assert len(selections) == 1 and selection is not None and selection.choice.hit.worker.worker_id == "w1"


def test_the_oldest_selections_are_forgotten_beyond_the_bound() -> None:
    selections = Selections(max_selections=2)
    for name in "abc":
        selections.keep(name, selected(10.0))
    assert [selections.find(name, 0.0) is not None for name in "abc"] == [False, True, True]
    selections.drop("c")
    selections.drop("c")
    assert len(selections) == 1
