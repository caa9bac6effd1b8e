# SPDX-License-Identifier: Apache-2.0
"""A reply from a template has the same bytes as msgspec's encoding of the same hits."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrouter.contract.tiers import TIERS, all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import HashPlan, HitTable, WorkerView
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.serve.api.query import PLACEHOLDER, make_template
from kvrouter.router.serve.api.responses import JSON, encode, query_reply
from tests.support.examples import examples

NAMES = st.text(max_size=8) | st.sampled_from(['"', "\\", ":7,", "é", "\u2028", f":{PLACEHOLDER},", f"{PLACEHOLDER}"])
TOKENS = st.integers(0, 2**31 - 1) | st.sampled_from([0, 9, 10, 99, 100, 2**31 - 1])


def view(name: str, rank: int, state: StreamState, reason: str) -> WorkerView:
    catalog = cast(Catalog, None)
    return WorkerView(WorkerKey("m", name, rank), None, state, True, reason, "e", catalog, None, {})


VIEWS = st.builds(view, NAMES, st.integers(0, 3), st.sampled_from(StreamState), st.just("") | NAMES)


def table_of(judged: list[WorkerView], none: list[tuple[WorkerView, str]], rows: list[list[int]]) -> HitTable:
    workers = tuple(view.worker for view in judged)
    states, reasons = tuple(view.state.value for view in judged), tuple(view.reason for view in judged)
    plan = HashPlan(tuple(judged), (), workers, states, reasons, ({},) * len(judged), cast(Any, None), True, 1)
    return HitTable(plan, np.array(rows, np.int64).reshape(len(judged), 5), tuple(none))


@settings(max_examples=examples(300))
@given(st.data())
def test_a_template_writes_what_msgspec_writes(data: st.DataObject) -> None:
    views = data.draw(st.lists(VIEWS, max_size=6, unique_by=lambda worker_view: worker_view.worker.worker_id))
    cut = data.draw(st.integers(0, len(views)))
    none = [(worker_view, data.draw(NAMES)) for worker_view in views[:cut]]
    judged = views[cut:]
    rows = [data.draw(st.lists(TOKENS, min_size=5, max_size=5)) for _ in judged]
    template = make_template(table := table_of(judged, none, rows))
    hits = [Hit(worker_view.worker, all_on_gpu(0), worker_view.state.value, reason) for worker_view, reason in none]
    hits += [
        Hit(worker_view.worker, tuple(row[: len(TIERS)]), worker_view.state.value, worker_view.reason)
        for worker_view, row in zip(judged, rows, strict=True)
    ]
    assume(template is not None)
    assert template is not None
    assert template.fill(table.found) == encode(query_reply(hits, explain=False), JSON)[0]


@settings(max_examples=examples(200))
@given(st.data())
def test_sources_add_the_field_peer_and_change_nothing_else(data: st.DataObject) -> None:
    workers = data.draw(st.lists(st.builds(WorkerKey, st.just("m"), NAMES, st.integers(0, 2)), max_size=6, unique=True))
    hits, with_pulls = [], []
    for worker in workers:
        tokens = data.draw(TOKENS)
        hits.append(Hit(worker, all_on_gpu(tokens), "live", ""))
        pulls = data.draw(st.lists(st.builds(Pull, st.sampled_from(workers), TOKENS), max_size=2))
        better = sorted((pull for pull in pulls if pull.tokens > tokens), key=lambda pull: -pull.tokens)
        with_pulls.append(msgspec.structs.replace(hits[-1], pulls=tuple(better)))
    plain, reply = query_reply(hits, explain=False), query_reply(with_pulls, explain=False)
    for name, instance in reply.instances.items():
        ranks = [hit for hit in with_pulls if hit.worker.worker_id == name]
        most = max((hit.pulls[0].tokens for hit in ranks if hit.pulls), default=0)
        assert (0 if instance.peer is None else instance.peer.tokens) == (
            most if most > instance.longest_matched else 0
        )
    without = {name: msgspec.structs.replace(instance, peer=None) for name, instance in reply.instances.items()}
    assert encode(msgspec.structs.replace(reply, instances=without), JSON) == encode(plain, JSON)


def test_names_that_could_be_taken_for_numbers_have_no_template() -> None:
    plain = view("w0", 0, StreamState.LIVE, "")
    assert make_template(table_of([plain], [], [[0] * 5])) is not None
    odd = view(f"a:{PLACEHOLDER},", 0, StreamState.LIVE, "")
    assert make_template(table_of([odd], [], [[0] * 5])) is None


@pytest.mark.parametrize("shape", [(0, 5), (1, 4), (1, 6)])
def test_a_template_reads_nothing_beside_a_table(shape: tuple[int, int]) -> None:
    template = make_template(table_of([view("w0", 0, StreamState.LIVE, "")], [], [[0] * 5]))
    assert template is not None
    with pytest.raises((ValueError, IndexError)):
        template.fill(np.zeros(shape, np.int64))


@pytest.mark.parametrize("rank", [0, 1])
def test_several_ranks_of_a_worker_have_no_template(rank: int) -> None:
    ranks = [view("w0", 0, StreamState.LIVE, ""), view("w1" if not rank else "w0", rank, StreamState.LIVE, "")]
    assert (make_template(table_of(ranks, [], [[0] * 5] * 2)) is None) == bool(rank)
