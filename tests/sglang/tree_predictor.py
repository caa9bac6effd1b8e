# SPDX-License-Identifier: Apache-2.0
"""The router's own prediction from the patch's reports: its catalog, mirror, hashes and hit rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.events.patch.messages import (
    DeclaredCatalog,
    ReportCleared,
    ReportEvent,
    ReportRemoved,
    unpack_hashes,
)
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.declared_catalog import declared_spec
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import build_catalog, group_of
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState

WORKER = WorkerKey("m", "w")


class TreePredictor:
    """A stand-in for a reporter (`Reports`) that applies each report at once.

    Reports and catalogs are read from their bytes, as by a router: the installed patch has its own classes of them.
    """

    def __init__(self) -> None:
        self.catalog: DeclaredCatalog | None = None
        # The hashes that each place holds.
        self.held: dict[Place, set[int]] = {}
        # How many hashes were stored and removed, and how many clears there were.
        self.stored = self.removed = self.clears = 0
        self.closed = False
        # The reason why nothing is reported from now on, or "".
        self.withheld = ""

    def publish(self, make: Callable[[], Iterable[ReportEvent]], batch_seq: int | None) -> None:
        assert not self.withheld, "nothing is reported behind that"
        for event in msgspec.msgpack.decode(msgspec.msgpack.encode(list(make())), type=list[ReportEvent]):
            if isinstance(event, ReportCleared):
                self.clears += 1
                for place in [place for place in self.held if place.medium == event.medium]:
                    del self.held[place]
                continue
            assert event.group_idx is not None
            held = self.held.setdefault(Place(event.group_idx, event.medium), set())
            hashes = set(unpack_hashes(event.hashes).tolist())
            if isinstance(event, ReportRemoved):
                assert hashes <= held, "what goes was there"
                held -= hashes
                self.removed += len(hashes)
            else:
                assert not hashes & held, "what comes was not there"
                held |= hashes
                self.stored += len(hashes)

    def declare(self, catalog: DeclaredCatalog) -> None:
        self.catalog = msgspec.msgpack.decode(msgspec.msgpack.encode(catalog), type=DeclaredCatalog)

    def withhold(self, scope: Scope, reason: str) -> None:
        assert scope is Scope.EVERYTHING
        self.withheld = reason
        self.held.clear()

    def close(self) -> None:
        self.closed = True

    def hit(self, tokens: list[int], salt: str | None, lora: str | None, *, alone: bool = False) -> Hit:
        """Return the hit of a prompt; with `alone`, from full attention alone, as if there were no other group."""
        assert self.catalog is not None
        spec = ENGINES[self.catalog.engine].completed(declared_spec(self.catalog, CatalogSpec()))
        if alone:
            spec = msgspec.structs.replace(spec, groups=spec.groups[:1])
        catalog = build_catalog(map(group_of, spec.groups), "declared", spec)
        mirror = Mirror(1 << 24)
        mirror.begin_epoch(WORKER, "e")
        for place, hashes in self.held.items():
            if hashes and not (alone and place.group_idx):
                mirror.add(WORKER, place, np.fromiter(hashes, np.uint64, len(hashes)))
        scheme = HashScheme.from_bytes(self.catalog.hash_algo or "", b"")
        view = WorkerView(WORKER, None, StreamState.LIVE, True, "", "e", catalog, scheme, spec.lora_paths)
        question = Question(
            "m",
            len(tokens),
            token_ids=np.array(tokens, np.int64),
            lora_name=None if lora is None else f"name of {lora}",
            cache_salt=salt,
        )
        (hit,) = Matcher(mirror, SegmentMemory(0)).match(question, HashPlans.build(mirror, [view]))
        return hit
