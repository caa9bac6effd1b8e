# SPDX-License-Identifier: Apache-2.0
"""SGLang's hit rule against a walk over tree nodes, written after SGLang's own.

Source: SGLang 0.5.23 srt/mem_cache/unified_cache/unified_tree_core.py:905, components/swa.py:357, mamba.py:151,
unified_radix_cache.py:1857.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import CPU, GPU, Place
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.offload_connectors import HICACHE
from kvrouter.router.model.workers.registration import CatalogSpec
from tests.support.examples import examples
from tests.support.judging import judge

FULL, SWA, MAMBA = "full_attention", "sliding_window", "mamba"
LAYOUTS = [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]

# The page index range of a node, and for each component whether its value is on the device, and on the host.
Node = tuple[range, dict[str, bool], dict[str, bool]]


def walk(
    nodes: list[Node], kinds: tuple[str, ...], page: int, window: int, limit: int, hicache: bool
) -> tuple[int, int]:
    """Return the device hit and the hit with the host tier, in tokens, by walking node by node.

    `limit` is the number of tokens of the key.
    """

    def matched(device_only: bool) -> int:
        best, run, at = 0, float("inf"), 0
        for pages, device, host in nodes:
            if not device[FULL] and (not host[FULL] or not hicache):
                break
            length = max(0, min(len(pages), limit // page - pages.start))
            if length == 0:
                break
            cut = length < len(pages)
            valid = device[FULL] or (host[FULL] and not device_only)
            if SWA in kinds:
                if device[SWA] or (host[SWA] and not device_only):
                    run += length * page
                else:
                    run = 0
                valid = valid and run >= window
            if MAMBA in kinds:
                # A node that the key splits has no state in the half that the key reaches.
                valid = valid and not cut and (device[MAMBA] or (host[MAMBA] and not device_only))
            at += length * page
            if valid:
                best = at
            if cut:
                break
        return best

    on_device = matched(True)
    if not hicache:
        return on_device, on_device
    best = matched(False)
    if best <= on_device:
        return on_device, on_device
    kv_tokens, others, swa = 0, False, 0
    path = [node for node in nodes if node[0].start * page < best]
    for pages, device, _host in path:
        end = min(pages.stop, best // page)
        kv_tokens += 0 if device[FULL] else (end - pages.start) * page
    if MAMBA in kinds:
        others = not path[-1][1][MAMBA]
    if SWA in kinds:
        for pages, device, _host in reversed(path):
            if swa >= window:
                break
            others = others or not device[SWA]
            swa += (min(pages.stop, best // page) - pages.start) * page
    return on_device, best if kv_tokens >= 10 or others else on_device


def make_nodes(draw: random.Random, kinds: tuple[str, ...], hicache: bool) -> list[Node]:
    nodes: list[Node] = []
    start = 0
    density = draw.choice([0.5, 0.8, 0.95])
    device_gone = False
    for _ in range(draw.randint(0, 8)):
        pages = range(start, start + draw.randint(1, 6))
        start = pages.stop
        # Device pages of full attention are evicted from the leaves upwards.
        device_gone = device_gone or draw.random() > density
        device = {kind: not device_gone and draw.random() < density for kind in kinds} | {FULL: not device_gone}
        host = {kind: hicache and draw.random() < density for kind in kinds}
        nodes.append((pages, device, host))
    return nodes


def held_places(nodes: list[Node], kinds: tuple[str, ...]) -> dict[Place, set[int]]:
    held_by_place: dict[Place, set[int]] = {}
    for group, kind in enumerate(kinds):
        for pages, device, host in nodes:
            for medium, side in ((GPU, device), (CPU, host)):
                if side[kind]:
                    held = held_by_place.setdefault(Place(group, medium), set())
                    held |= {pages.stop - 1} if kind == MAMBA else set(pages)
    return held_by_place


@pytest.mark.parametrize("kinds", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("hicache", [False, True])
@settings(max_examples=examples(300), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_hit_is_that_of_the_walk(kinds: tuple[str, ...], hicache: bool, seed: int) -> None:
    draw = random.Random(seed)
    page = draw.choice([1, 4, 16])
    window = draw.choice([1, page, page + 1, 2 * page, 3 * page - 1, 5 * page])
    eagle = draw.random() < 0.3
    nodes = make_nodes(draw, kinds, hicache)
    num_tokens = draw.randint(1, 30 * page)
    # One token is left to compute, and with EAGLE n tokens make n - 1 pairs.
    limit = max(0, num_tokens - 1 - eagle)
    # The walk's windows cover whole nodes; the pages inside a window are resident either way.
    device, with_host = walk(nodes, kinds, page, window, limit // page * page, hicache)
    spec = CatalogSpec(
        offload_connector=HICACHE,
        whole_windows=True,
        partial_hits=False,
        hash_algo="sglang_bigram" if eagle else "sglang",
    )
    groups = [Group(i, kind, page, window if kind == SWA else None) for i, kind in enumerate(kinds)]
    hit = judge(
        groups,
        held_places(nodes, kinds),
        num_tokens,
        catalog=build_catalog(groups, "declared", spec),
    )
    assert hit.by_tier == (device, with_host, with_host), (nodes, page, window, num_tokens, eagle)


def test_nine_tokens_are_not_loaded_back_and_ten_are() -> None:
    spec = CatalogSpec(offload_connector=HICACHE, whole_windows=True, partial_hits=False)
    catalog = build_catalog([Group(0, FULL, 1)], "declared", spec)
    for missing, expected in ((9, 20), (10, 30)):
        gpu = range(30 - missing) if missing == 10 else range(20)
        total = 29 if missing == 9 else 30
        hit = judge([], {Place(0, GPU): gpu, Place(0, CPU): range(total)}, total + 1, catalog=catalog)
        assert hit.by_tier[:2] == (20, expected)
