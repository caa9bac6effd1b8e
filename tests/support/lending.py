# SPDX-License-Identifier: Apache-2.0
"""Workers that lend each other chunks, each with a made-up residency, and a query of the real `Matcher` about them.

Hash index i is the hash of boundary i + 1, as in `judging.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place, WorkerKey
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Catalog, Group, build_catalog
from kvrouter.router.model.kvcache.offload_connectors import DISK_OWNER, OFFLOADING
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState

BUDGET_BYTES = 1 << 26
MODEL, EPOCH = "m", "e"
ADDRESS = PeerAddress("10.0.0.1", 6000, "e7c4")

Residency = Mapping[Place, Iterable[int]]


def key_of(number: int) -> WorkerKey:
    return WorkerKey(MODEL, f"w{number}")


def hashes_of(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([1000 + i for i in range(count)], np.uint64)


def view_of(number: int, catalog: Catalog, peer: PeerAddress | None = ADDRESS, credited: bool = True) -> WorkerView:
    scheme = HashScheme.default()
    return WorkerView(
        key_of(number),
        None,
        StreamState.LIVE,
        credited,
        "",
        EPOCH,
        catalog,
        scheme,
        {},
        peer=peer if credited else None,
    )


class Fleet:
    """Workers with made-up blocks, and the matcher that answers for them."""

    def __init__(self, residencies: Sequence[Residency], views: Sequence[WorkerView]) -> None:
        self.mirror = Mirror(BUDGET_BYTES)
        for view, residency in zip(views, residencies, strict=True):
            self.mirror.begin_epoch(view.worker, view.epoch)
            for place, indices in residency.items():
                self.mirror.add(view.worker, place, np.array([1000 + i for i in indices], np.uint64))
        self.plans = HashPlans.build(self.mirror, views)
        self.matcher = Matcher(self.mirror, SegmentMemory(0))
        self.hash_block_size = views[0].catalog.hash_block_size

    def question(self, num_tokens: int) -> Question:
        return Question(MODEL, num_tokens, block_hashes=hashes_of(num_tokens // self.hash_block_size))

    def hits(self, num_tokens: int) -> list[Hit]:
        """Return the hits in the order of the workers."""
        hits = self.matcher.match(self.question(num_tokens), self.plans)
        return sorted(hits, key=lambda hit: int(hit.worker.worker_id[1:]))


def lenders(residencies: Sequence[Residency], catalog: Catalog) -> Fleet:
    """Return a fleet of which all workers lend each other chunks."""
    return Fleet(residencies, [view_of(number, catalog) for number in range(len(residencies))])


def disk_lenders(residencies: Sequence[Residency], catalog: Catalog, lend_disk: Sequence[bool]) -> Fleet:
    """Return a fleet of which all workers lend each other chunks, some of them those on their disks, too."""
    addresses = [msgspec.structs.replace(ADDRESS, lends_disk=lends_disk) for lends_disk in lend_disk]
    return Fleet(residencies, [view_of(number, catalog, address) for number, address in enumerate(addresses)])


def random_catalog(draw: random.Random) -> Catalog:
    """Return a catalog as engines with an OffloadingConnector have it: windows, states, large chunks, EAGLE."""
    layout = draw.choice(["full", "windows", "states", "mixed sizes", "chunked"])
    block = draw.choice([4, 8])
    sizes = [block] * 6
    kinds = {
        "full": ["full_attention"],
        "windows": ["full_attention", *["sliding_window"] * draw.randint(1, 4)],
        "states": ["full_attention", *["mamba"] * draw.randint(1, 3)],
        "mixed sizes": ["full_attention", "sliding_window", "mamba"],
        "chunked": ["full_attention", "chunked_local_attention", "sliding_window"],
    }[layout]
    if layout == "windows":
        sizes = [draw.choice([4, 8, 16]) for _ in kinds]
    if layout == "states" and draw.random() < 0.5:
        # States with larger blocks than hashes, whose hits may end inside a block.
        sizes = [16] * len(kinds)
    eagle = layout in ("full", "windows") and draw.random() < 0.4
    groups = []
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=False)):
        window = draw.choice([1, size, size + 1, 3 * size, 40]) if kind == "sliding_window" else None
        chunk = draw.choice([2, 3]) * size if kind.startswith("chunked") else None
        groups.append(Group(i, kind, size, window, chunk, eagle=eagle and (i == 0 or draw.random() < 0.5)))
    spec = CatalogSpec(
        offload_connector=OFFLOADING,
        hash_block_size=4 if layout == "states" and sizes[0] == 16 else None,
        offload_blocks_per_chunk=draw.choice([1, 1, 1, 2, 3]),
    )
    catalog = build_catalog(groups, "configured", spec)
    assert catalog.problem is None, catalog.problem
    return catalog


def random_residency(draw: random.Random, catalog: Catalog, num_tokens: int) -> dict[Place, set[int]]:
    """Return blocks on GPU, CPU and disk, in an order of places that differs from worker to worker."""
    hash_block = catalog.hash_block_size
    resident: dict[Place, set[int]] = {}
    media = [(GPU, None), (CPU, None), (STORAGE, DISK_OWNER)]
    draw.shuffle(media)
    for medium, owner in media:
        density = draw.choice([0.0, 0.5, 0.85, 0.97, 1.0])
        begin, end = sorted((draw.randint(0, num_tokens), draw.randint(0, num_tokens + 40)))
        if draw.random() < 0.6:
            begin = 0
        for group in draw.sample(catalog.groups, len(catalog.groups)):
            scale = group.block_size // hash_block * (1 if medium == GPU else catalog.blocks_per_chunk or 1)
            step = 1 if catalog.partial_hits and draw.random() < 0.3 else scale
            held = {
                i
                for i in range(step - 1, num_tokens // hash_block, step)
                if begin <= i * hash_block < end and draw.random() < density
            }
            if held:
                resident[Place(group.group_idx, medium, owner)] = held
    return resident


def cpu_only(residency: Mapping[Place, set[int]]) -> dict[Place, set[int]]:
    """Return what the CPU tier of a worker holds."""
    return lent_of(residency, False)


def lent_of(residency: Mapping[Place, set[int]], lends_disk: bool) -> dict[Place, set[int]]:
    """Return what the tiers hold that a worker lends."""
    media = (CPU, STORAGE) if lends_disk else (CPU,)
    return {place: held for place, held in residency.items() if place.medium in media}


def union(first: Mapping[Place, set[int]], second: Mapping[Place, set[int]]) -> dict[Place, set[int]]:
    """Return the blocks of both at each place."""
    return {place: first.get(place, set()) | second.get(place, set()) for place in {**first, **second}}


def alone(residency: Residency, catalog: Catalog, num_tokens: int) -> Hit:
    """Return the hit of one worker that lends and fetches nothing."""
    (hit,) = Fleet([residency], [view_of(0, catalog, None)]).hits(num_tokens)
    return hit
