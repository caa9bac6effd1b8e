# SPDX-License-Identifier: Apache-2.0
"""A choice sees no sources where the request could not name one."""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from tests.support.placing_stage import Stage, ask, hit

PULLS = (Pull(WorkerKey("m", "b"), 96),)


def test_sources_count_only_for_one_sequence_that_can_name_them() -> None:
    stage = Stage(msgspec.structs.replace(hit("a", 64), pulls=PULLS))
    request = ask()
    assert stage.placer.choose(request).hit.pulls == PULLS
    for changes in ({"may_pull": False}, {"answers": 2}):
        choice = stage.placer.choose(msgspec.structs.replace(request, **changes))
        assert (choice.hit.pulls, choice.hit.tokens) == ((), 64)
