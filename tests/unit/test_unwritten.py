# SPDX-License-Identifier: Apache-2.0
"""Time for which news has waited for the store, as heartbeats report it, also while nothing writes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.stream_items import Connected
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.commits import Commits
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.store import keys
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.bare_services import bare_services
from tests.support.ingest_steps import REPLAY, batch, stored

WORKER = WorkerKey("m", "w")
GREETING_S = 3.0


@pytest.mark.parametrize("news", ["the stream is changed", "a batch comes"])
async def test_a_change_waits_from_the_moment_it_is_known(news: str) -> None:
    now_s = 100.0
    mirror = SimpleNamespace(**dict.fromkeys(("load", "begin_epoch", "change"), lambda *change: None))
    services = dataclasses.replace(bare_services(lambda: now_s), mirror=cast(Any, mirror))
    state = WorkerState(Registration(WORKER, events="tcp://127.0.0.1:1", replay=REPLAY), services)
    commits = Commits(state, cast(Any, SimpleNamespace(number=1)), services)
    state.on_mirror_taken(has_log=False)
    for item in (FellBehind(), Connected(), batch(0, stored([1])), CaughtUp()):
        state.ingest.apply(item, now_s)
    state.on_items(now_s)
    assert state.ingest.state is StreamState.LIVE
    # The store has everything by now; a checkpoint is being written, or the patch is greeted.
    services.held.unwritten_since_s.clear()
    state.dirty.clear()
    if news == "a batch comes":
        state.ingest.apply(batch(1, stored([2])), now_s)
        state.on_items(now_s)
        commits.wake()
    else:
        state.on_paused("the other stream is followed in a moment")
    now_s += GREETING_S
    assert services.held.waits_s(keys.worker_tag(WORKER), now_s) == GREETING_S
    state.on_stopped()
