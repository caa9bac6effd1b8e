# SPDX-License-Identifier: Apache-2.0
"""The sources from which workers may fetch blocks, as the matcher attaches them to hits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place
from kvrouter.router.index.matching.exchanges import MAX_SOURCES
from kvrouter.router.index.matching.matcher import HashPlans, WorkerView, sum_of
from kvrouter.router.index.matching.question import Hit, Question, filter_hits
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_chain
from kvrouter.router.model.kvcache.catalog import Catalog, Group, build_catalog
from kvrouter.router.model.kvcache.offload_connectors import DISK_OWNER, OFFLOADING, SIMPLE_CPU
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.lending import ADDRESS, Fleet, Residency, disk_lenders, key_of, lenders, view_of

FULL, WINDOW = Group(0, "full_attention", 16), Group(1, "sliding_window", 16, 64)
NUM_TOKENS = 200


def catalog_of(*groups: Group, connector: str = OFFLOADING, chunk: int | None = 1) -> Catalog:
    return build_catalog(groups, "declared", CatalogSpec(offload_connector=connector, offload_blocks_per_chunk=chunk))


CATALOG = catalog_of(FULL)
HOLDS: Residency = {Place(0, CPU): range(12)}
LACKS: Residency = {}
PART: Residency = {Place(0, GPU): range(4)}


def pulls_of(hits: Sequence[Hit]) -> list[list[tuple[str, int]]]:
    return [[(pull.source.worker_id, pull.tokens) for pull in hit.pulls] for hit in hits]


def fleet_of(residencies: Sequence[Residency], *views: WorkerView) -> Fleet:
    return Fleet(residencies, views)


def test_a_worker_that_holds_nothing_reuses_what_its_source_lends() -> None:
    hits = lenders([HOLDS, LACKS], CATALOG).hits(NUM_TOKENS)
    assert [hit.by_tier for hit in hits] == [(0, 192, 192), (0, 0, 0)]
    assert pulls_of(hits) == [[], [("w0", 192)]]


def test_the_gpu_and_the_disk_of_a_source_are_not_lent() -> None:
    rich = {Place(0, GPU): range(12), Place(0, STORAGE, DISK_OWNER): range(12), Place(0, CPU): range(5)}
    assert pulls_of(lenders([rich, LACKS], CATALOG).hits(NUM_TOKENS)) == [[], [("w0", 80)]]


def test_the_disk_counts_for_the_source_alone_that_lends_it() -> None:
    rich = {Place(0, CPU): range(5), Place(0, STORAGE, DISK_OWNER): range(5, 12)}
    for lend_disk in ([True, False, False], [False, True, False]):
        hits = disk_lenders([rich, rich, LACKS], CATALOG, lend_disk).hits(NUM_TOKENS)
        lending = f"w{lend_disk.index(True)}"
        assert pulls_of(hits)[2][0] == (lending, 192) and pulls_of(hits)[2][1][1] == 80
        assert [hit.by_tier for hit in hits] == [(0, 80, 192), (0, 80, 192), (0, 0, 0)]


def test_a_window_that_the_source_lacks_may_be_the_workers_own() -> None:
    source = {Place(0, CPU): range(12), Place(1, CPU): [0, 1, 2, 3, 4]}
    worker = {Place(0, GPU): range(2), Place(1, GPU): range(2), Place(1, STORAGE, DISK_OWNER): range(5, 12)}
    hits = lenders([source, worker], catalog_of(FULL, WINDOW)).hits(NUM_TOKENS)
    assert hits[0].tokens == 80 and hits[1].tokens == 32
    assert pulls_of(hits) == [[], [("w0", 192)]]


def test_the_next_question_borrows_nothing() -> None:
    fleet = lenders([HOLDS, PART], CATALOG)
    first = fleet.hits(NUM_TOKENS)
    assert [hit.by_tier for hit in first] == [(0, 192, 192), (64, 64, 64)] and pulls_of(first)[1] == [("w0", 192)]
    assert fleet.hits(NUM_TOKENS) == first


def test_the_best_source_comes_first_and_there_are_only_a_few() -> None:
    held = [{Place(0, CPU): range(end)} for end in (3, 7, 12, 5, 9, 1)]
    hits = lenders([*held, LACKS], CATALOG).hits(NUM_TOKENS)
    assert pulls_of(hits)[-1] == [("w2", 192), ("w4", 144), ("w1", 112)] and MAX_SOURCES == 3
    assert pulls_of(hits)[4] == [("w2", 192)]


def test_prompts_with_other_ends_draw_from_other_sources_among_equal_ones() -> None:
    fleet = lenders([*[HOLDS] * 8, LACKS], CATALOG)
    sources = set()
    for blocks in range(2, 12):
        *_, hit = fleet.hits(16 * blocks + 1)
        assert len(hit.pulls) == MAX_SOURCES
        sources.add(hit.pulls[0].source)
    assert len(sources) > MAX_SOURCES


@pytest.mark.parametrize("change", [{"exchange": "other"}, {"resets": 1}])
def test_engines_that_refuse_each_other_are_no_pair(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(ADDRESS, **change)
    fleet = fleet_of([HOLDS, LACKS, LACKS], view_of(0, CATALOG), view_of(1, CATALOG, other), view_of(2, CATALOG))
    assert pulls_of(fleet.hits(NUM_TOKENS)) == [[], [], [("w0", 192)]]


def test_workers_of_other_groups_are_no_pair() -> None:
    fleet = fleet_of([HOLDS, LACKS], view_of(0, CATALOG), view_of(1, catalog_of(FULL, WINDOW)))
    assert pulls_of(fleet.hits(NUM_TOKENS)) == [[], []] and not fleet.plans.by_hash.has_exchanges  # type: ignore[union-attr]


@pytest.mark.parametrize("catalog", [catalog_of(FULL, connector=SIMPLE_CPU), catalog_of(FULL, chunk=None)])
def test_only_tiers_with_chunks_of_a_known_size_exchange_any(catalog: Catalog) -> None:
    assert pulls_of(lenders([HOLDS, LACKS], catalog).hits(NUM_TOKENS)) == [[], []]


@pytest.mark.parametrize(
    "lost", [view_of(0, CATALOG, None), view_of(0, CATALOG, credited=False)], ids=["no address", "no credit"]
)
def test_a_worker_without_address_or_credit_is_no_source(lost: WorkerView) -> None:
    fleet = fleet_of([HOLDS, LACKS, HOLDS], lost, view_of(1, CATALOG), view_of(2, CATALOG))
    assert pulls_of(fleet.hits(NUM_TOKENS))[1] == [("w2", 192)]


def test_a_worker_without_address_has_no_sources() -> None:
    fleet = fleet_of([HOLDS, LACKS, LACKS], view_of(0, CATALOG), view_of(1, CATALOG, None), view_of(2, CATALOG))
    assert pulls_of(fleet.hits(NUM_TOKENS)) == [[], [], [("w0", 192)]]


def test_an_excluded_worker_still_lends() -> None:
    fleet = lenders([HOLDS, LACKS, PART], CATALOG)
    question = msgspec.structs.replace(fleet.question(NUM_TOKENS), exclude_worker_ids=frozenset({"w0"}))
    left = filter_hits(fleet.matcher.match(question, fleet.plans), question)
    assert [(hit.worker.worker_id, pulls_of([hit])[0]) for hit in left] == [
        ("w1", [("w0", 192)]),
        ("w2", [("w0", 192)]),
    ]


def test_a_table_is_made_only_of_hits_without_pulls() -> None:
    fleet = lenders([HOLDS, LACKS], CATALOG)
    assert fleet.matcher.table(fleet.question(NUM_TOKENS), fleet.plans) is None
    everywhere = lenders([HOLDS, HOLDS], CATALOG)
    table = everywhere.matcher.table(everywhere.question(NUM_TOKENS), everywhere.plans)
    assert table is not None and [hit.tokens for hit in table.hits()] == [192, 192]


def test_the_sum_of_several_prompts_has_no_pulls() -> None:
    fleet = lenders([HOLDS, LACKS], CATALOG)
    question = fleet.question(NUM_TOKENS)
    summed = fleet.matcher.match_list([question, question], fleet.plans, is_last_known=True)
    assert summed is not None and [hit.tokens for hit in summed] == [384, 0] and pulls_of(summed) == [[], []]
    hits = fleet.matcher.match(question, fleet.plans)
    assert any(pulls_of(hits)) and not any(pulls_of(sum_of([hits, hits], is_last_known=True)))


def test_an_explained_hit_keeps_its_pulls() -> None:
    fleet = lenders([HOLDS, LACKS], CATALOG)
    question = msgspec.structs.replace(fleet.question(NUM_TOKENS), explain=True, held=True)
    hits = fleet.matcher.match(question, fleet.plans)
    assert pulls_of(hits) == [[], [("w0", 192)]] and all(hit.groups for hit in hits)


@pytest.mark.parametrize("paths", [("/a", "/a", "/a"), ("/a", "/a", "/b"), ("/a", None, "/a")])
def test_adapters_lend_only_under_one_path(paths: Sequence[str | None]) -> None:
    views = [
        msgspec.structs.replace(view_of(number, CATALOG), lora_paths={} if path is None else {"sql": path})
        for number, path in enumerate(paths)
    ]
    tokens = np.arange(NUM_TOKENS)
    hashes, _ = hash_chain(HashScheme.default(), None, tokens, 16, ((("lora", "sql", "/a"),),))
    fleet = Fleet([LACKS] * 3, views)
    fleet.mirror.add(key_of(0), Place(0, CPU), hashes)
    fleet.plans = HashPlans.build(fleet.mirror, views)
    question = Question("m", NUM_TOKENS, token_ids=tokens, lora_name="sql")
    hits = sorted(fleet.matcher.match(question, fleet.plans), key=lambda hit: hit.worker.worker_id)
    assert pulls_of(hits) == [[]] + [[("w0", 192)] if path == "/a" else [] for path in paths[1:]]


def test_a_guessed_worker_neither_lends_nor_fetches() -> None:
    guessed = msgspec.structs.replace(
        view_of(1, CATALOG, None, credited=False), state=StreamState.UNHASHABLE, approximate=True
    )
    fleet = fleet_of([HOLDS, HOLDS, LACKS], view_of(0, CATALOG), guessed, view_of(2, CATALOG))
    assert pulls_of(fleet.hits(NUM_TOKENS)) == [[], [], [("w0", 192)]]


def test_a_fleet_without_addresses_does_no_more_work() -> None:
    fleet = fleet_of([HOLDS, LACKS], view_of(0, CATALOG, None), view_of(1, CATALOG, None))
    assert fleet.plans.by_hash is not None and not fleet.plans.by_hash.has_exchanges
