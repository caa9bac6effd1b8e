# SPDX-License-Identifier: Apache-2.0
"""One worker's part of the fleet's events: the changes since the last publication, whichever router follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET

from kvrouter.contract.fleet_event import EventType
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.index.ingest.net_changes import NO_HASHES, Hashes, ResidencyDelta
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.model.workers.stream_state import StreamState


class Incidents(NamedTuple):
    """Counts over a worker's whole life."""

    # How often batches went missing.
    gaps: int = 0
    # How often the engine dropped a whole cache.
    clears: int = 0
    # How often the index came to agree with the engine again after something was missing.
    resyncs: int = 0


_TYPES = (EventType.GAP, EventType.CLEARED, EventType.RESYNC)


class WorkerEvents:
    """The publisher of one worker's events, which remembers what it published last."""

    def __init__(self, worker: WorkerKey, feed: EventFeed) -> None:
        self._worker = worker
        self._feed = feed
        self.incidents: Incidents | None = None
        self._state: tuple[StreamState, bool] | None = None

    def begin_epoch(self, epoch: str, reason: str) -> None:
        """Publish that the worker's residency is void, and that an empty epoch begins."""
        self._publish(EventType.EPOCH, epoch=epoch, reason=reason or UNSET)

    def changed(self, epoch: str, seq: int | None, changes: Sequence[ResidencyDelta]) -> None:
        """Publish changes of the worker's residency.

        Args:
            epoch: The worker's epoch.
            seq: The last batch that is part of the changes, None if it is unknown.
            changes: The changes at each place.
        """
        for change in changes:
            for event_type, hashes in ((EventType.REMOVED, change.removed), (EventType.STORED, change.added)):
                if len(hashes):
                    place = change.place
                    self._feed.of_worker(
                        event_type,
                        self._worker,
                        hashes,
                        epoch=epoch,
                        seq=UNSET if seq is None else seq,
                        group_idx=place.group_idx,
                        medium=place.medium,
                        owner=place.ownership or UNSET,
                        blocks=len(hashes),
                    )

    def load(self, epoch: str, seq: int | None, places: Mapping[Place, Hashes]) -> None:
        """Publish all blocks of a worker that was loaded from Redis as a whole.

        The difference from the events published before is not known, so the worker begins an epoch.
        """
        self.begin_epoch(epoch, "loaded from Redis as a whole; what it holds follows")
        self.changed(epoch, seq, [ResidencyDelta(place, hashes, NO_HASHES) for place, hashes in places.items()])

    def happened(self, incidents: Incidents, reason: str) -> None:
        """Publish the incidents since the last call. `incidents` counts the worker's whole life."""
        before, self.incidents = self.incidents or incidents, incidents
        for event_type, was, is_now in zip(_TYPES, before, incidents, strict=True):
            if is_now > was:
                self._publish(event_type, count=is_now - was, reason=reason or UNSET)

    def viewed(self, view: WorkerView) -> None:
        """Publish the worker's state and credit if they changed."""
        state = view.state, view.credited
        if state != self._state:
            self._state = state
            self._publish(EventType.STATE, state=view.state.value, credited=view.credited, reason=view.reason or UNSET)

    def _publish(self, event_type: EventType, **more: Any) -> None:
        self._feed.of_worker(event_type, self._worker, **more)
