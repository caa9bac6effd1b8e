# SPDX-License-Identifier: Apache-2.0
"""The router's hits for engines that lend and fetch, by what they declare and the blocks that they hold.

The blocks are read from the objects that decide reuse, so a wrong hit is a fault of the catalog or of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import msgspec
import numpy as np

from kvrouter.events.patch.messages import DeclaredCatalog
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.lending_address import lending_address
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.engine.offload_engine import OffloadEngine

MODEL = "m"
EPOCH = "e"
MIRROR_BYTES = 1 << 26


class Reuse(NamedTuple):
    """The tokens that an engine reuses from its own tiers, and with the chunks of its source."""

    local_tokens: int
    tokens: int
    # The places and hashes in the tiers that the source lends.
    lendable: Set[tuple[str, int]]


class PeerPredictor:
    """The predictions for prompts that come now, while all engines rest."""

    def __init__(self, engines: Sequence[OffloadEngine]) -> None:
        self._mirror = Mirror(MIRROR_BYTES)
        self._views: list[WorkerView] = []
        self._lendable: list[frozenset[tuple[str, int]]] = []
        for number, engine in enumerate(engines):
            worker = WorkerKey(MODEL, str(number))
            profile = WorkerProfile(Registration(worker, events=engine.endpoint), None)
            profile.declare(msgspec.convert(engine.do("declared"), DeclaredCatalog))
            self._mirror.begin_epoch(worker, EPOCH)
            places = engine.do("hashes")
            for place, hashes in places.items():
                group, medium, *owners = place.removeprefix("g").split(":")
                self._mirror.add(worker, Place(int(group), medium, *owners), np.array(hashes, np.uint64))
            assert profile.declared_peer is not None
            lent_media = ("CPU", "STORAGE")[: 1 + profile.declared_peer.lends_disk]
            self._lendable.append(
                frozenset(
                    (place, key) for place, keys in places.items() if place.split(":")[1] in lent_media for key in keys
                )
            )
            peer = lending_address(profile.declared_peer, [engine.endpoint])
            scheme, catalog = profile.identity.scheme, profile.catalog
            view = WorkerView(worker, None, StreamState.LIVE, True, "", EPOCH, catalog, scheme, {}, peer=peer)
            self._views.append(view)

    def reuse(self, engine: int, token_ids: Sequence[int], source: int | None) -> Reuse:
        """Return what an engine reuses of a prompt that names another engine as its source, or none."""
        hit = self._hits(token_ids)[engine]
        if source is None:
            return Reuse(hit.tokens, hit.tokens, frozenset())
        pulls = [pull.tokens for pull in hit.pulls if pull.source.worker_id == str(source)]
        return Reuse(hit.tokens, max(pulls, default=hit.tokens), self._lendable[source])

    def _hits(self, token_ids: Sequence[int]) -> list[Hit]:
        question = Question(MODEL, len(token_ids), token_ids=np.array(token_ids))
        found = Matcher(self._mirror, SegmentMemory(0)).match(question, HashPlans.build(self._mirror, self._views))
        return sorted(found, key=lambda hit: hit.worker.worker_id)
