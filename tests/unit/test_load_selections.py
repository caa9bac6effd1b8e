# SPDX-License-Identifier: Apache-2.0
"""What was chosen and not reserved yet: kept for a while, and not without bound."""

from __future__ import annotations

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.selections import Selected, Selections


def selected(expiry_s: float, worker_id: str = "w0") -> Selected:
    hit = Hit(WorkerKey("m", worker_id), 0, 0, 0, "live", "")
    return Selected("m", Choice(hit, None, "", None), [], 10, None, expiry_s)


def test_it_is_found_until_it_expires() -> None:
    kept = Selections()
    kept.keep("a", selected(10.0))
    kept.keep("b", selected(20.0))
    assert kept.find("a", 9.9) is not None and kept.find("a", 10.0) is None and kept.find("none", 0.0) is None
    kept.expire(10.0)
    assert len(kept) == 1 and kept.find("b", 10.0) is not None


def test_a_later_one_of_the_same_id_takes_its_place() -> None:
    kept = Selections()
    kept.keep("a", selected(10.0, "w0"))
    kept.keep("a", selected(10.0, "w1"))
    found = kept.find("a", 0.0)
    assert len(kept) == 1 and found is not None and found.choice.hit.worker.worker_id == "w1"


def test_the_oldest_go_for_want_of_room() -> None:
    kept = Selections(max_selections=2)
    for name in "abc":
        kept.keep(name, selected(10.0))
    assert [kept.find(name, 0.0) is not None for name in "abc"] == [False, True, True]
    kept.drop("c")
    kept.drop("c")
    assert len(kept) == 1
