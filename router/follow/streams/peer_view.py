# SPDX-License-Identifier: Apache-2.0
"""A worker that another router process follows, as Redis describes it: catalog, hash scheme, state, block counts. Pure.

The follower of a worker writes the worker's state into `meta` with its commits. This module reads the state back, so
that all routers give the same answers.
"""

from __future__ import annotations

import logging
import math

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import Place
from kvrouter.router.follow.streams.stream_view import Position
from kvrouter.router.follow.streams.worker_events import Incidents
from kvrouter.router.index.ingest.worker_profile import (
    META_CLEARS,
    META_DECLARED,
    META_GAPS,
    META_LEARNED,
    META_RESYNCS,
    META_SCHEME,
    WorkerProfile,
)
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import LeaseValue, WorkerImage
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState

log = logging.getLogger("kvrouter.peers")

META_STATE = "state"
META_REASON = "reason"
META_CREDITED = "credited"
# When the engine's process started, as its HTTP reports. A router that takes the worker over compares it, to notice
# another process.
META_ENGINE_START = "engine_start"
# The problem of the disk below the engine's offload tier.
META_DISK = "disk"
# The KV cache as the engine's metrics page describes it.
META_ENGINE_CACHE = "engine_cache"
# Where the engine lends chunks of its CPU tier. The declared catalog has it too, but is written only with a commit of
# blocks, and an engine that was just reset or started may have none for long.
META_LENDING = "lending"
# The number of the lease under which the state was written, to distinguish the former follower's state from the present
# one's.
META_STATE_LEASE = "state_lease"
# The value of that lease, which names the router that wrote the state. Routers of older versions do not write it, so it
# counts only beside the same number.
META_STATE_WRITER = "state_writer"

# The errors of reading a worker's `meta` in Redis that another version of the router, or another program, has written.
RESTORE_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, KeyError, RecursionError)

# The fields of meta that describe the catalog and the hash scheme. Few commits contain them.
_SHAPING = frozenset({META_LEARNED, META_SCHEME, META_DECLARED})
NOTHING_SAID = EngineCache()
_STATES = {state.value.encode(): state for state in StreamState}


def engine_start_s(meta: dict[str, bytes]) -> float | None:
    """Return when the engine's process started, or None if META_ENGINE_START is missing or no finite number."""
    try:
        start_s = float(meta.get(META_ENGINE_START, b""))
    except ValueError:
        return None
    return start_s if math.isfinite(start_s) else None


def engine_cache(meta: dict[str, bytes]) -> EngineCache:
    """Return the cache that META_ENGINE_CACHE describes.

    The description is empty if the field is missing, or if another version wrote it differently.
    """
    try:
        return msgspec.json.decode(meta.get(META_ENGINE_CACHE, b"{}"), type=EngineCache)
    except RESTORE_ERRORS:
        return EngineCache()


def declared_peer_of(meta: dict[str, bytes]) -> PeerAddress | None:
    """Return where the engine declares that it lends chunks; None if nowhere, or if another version wrote the field."""
    try:
        return msgspec.json.decode(meta.get(META_LENDING) or b"null", type=PeerAddress | None)
    except RESTORE_ERRORS:
        return None


def state_fields(
    state: StreamState,
    reason: str,
    credited: bool,
    start_s: float | None,
    disk: str = "",
    cache: EngineCache = NOTHING_SAID,
    declared_peer: PeerAddress | None = None,
) -> dict[str, bytes]:
    """Return the state as fields of the worker's `meta` in Redis.

    Args:
        state: The worker's state.
        reason: Why it is in this state.
        credited: Whether its blocks count as hits.
        start_s: When the engine's process started, None if it is unknown.
        disk: The problem of the engine's disk.
        cache: The KV cache as the engine's metrics page describes it.
        declared_peer: Where the engine declares that it lends chunks.
    """
    return {
        META_ENGINE_START: b"" if start_s is None else repr(start_s).encode(),
        META_STATE: state.value.encode(),
        META_REASON: reason.encode("utf-8", "surrogatepass"),
        META_CREDITED: b"%d" % credited,
        META_DISK: disk.encode(),
        META_ENGINE_CACHE: msgspec.json.encode(cache),
        META_LENDING: b"" if declared_peer is None else msgspec.json.encode(declared_peer),
    }


class PeerView:
    """One worker as its log in Redis shows it.

    `profile` is read from Redis, not learned from the worker's events.
    """

    def __init__(self, registration: Registration, seed: str | None) -> None:
        self._registration = registration
        self._seed = seed
        self._meta: dict[str, bytes] = {}
        self._counts: dict[Place, int] = {}
        self._shape_problem = ""
        self.epoch = ""
        self.position = Position()
        self.profile = WorkerProfile(registration, seed)

    def _explain(self, epoch: str) -> None:
        """Begin `epoch` with the catalog and the hash scheme that `_meta` describes."""
        self.epoch, self._shape_problem = epoch, ""
        self.profile = WorkerProfile(self._registration, self._seed)
        try:
            self.profile.load(self._meta)
        except RESTORE_ERRORS as error:
            # Use no part of a value whose meaning is unknown.
            log.warning("stored state not readable", extra={"worker": self._registration.worker, "error": str(error)})
            self._shape_problem = (
                f"Redis holds a catalog or hash scheme of it that no router writes ({printable(str(error))})"
            )
            self.profile = WorkerProfile(self._registration, self._seed)

    def take_image(self, image: WorkerImage) -> None:
        """Take the image that was loaded from Redis. It does not prove that its writer still lives."""
        self._meta = dict(image.meta)
        self.position = Position(self._number(META_STATE_LEASE), image.commits)
        self._counts = {place: len(hashes) for place, hashes in image.places.items()}
        self._explain(image.epoch or "")

    def take_entry(self, entry: LogEntry, now_s: float) -> bool:
        """Take one log entry; return whether anything except counts may have changed."""
        if entry.opened_epoch:
            self._meta, self._counts = {}, {}
        self._meta |= entry.meta
        lease = self._number(META_STATE_LEASE)
        # Nobody knows when the writer of an entry of the backlog lived.
        is_news = lease != self.position.lease and not entry.is_backlog
        since_s = now_s if is_news else self.position.since_s
        self.position = Position(lease, entry.commit, since_s, self._writer(lease))
        for change in entry.changes:
            self._counts[change.place] = self._counts.get(change.place, 0) + len(change.added) - len(change.removed)
        if entry.opened_epoch or entry.meta.keys() & _SHAPING:
            self._explain(entry.epoch)
            return True
        return META_STATE in entry.meta or META_GAPS in entry.meta

    @property
    def problem(self) -> str:
        """Why the stored values cannot be interpreted, or "" if they can."""
        if META_STATE in self._meta and self._meta[META_STATE] not in _STATES:
            return f"Redis holds a state of it that no router writes ({self._meta[META_STATE]!r})"
        return self._shape_problem

    @property
    def state(self) -> StreamState:
        """The state that the follower published, CONNECTING if there is none."""
        return _STATES.get(self._meta.get(META_STATE, b""), StreamState.CONNECTING)

    @property
    def credited(self) -> bool:
        """Whether the process that follows the worker credits it with its blocks."""
        return self._meta.get(META_CREDITED, b"0") == b"1"

    @property
    def reason(self) -> str:
        """Why the worker is in its state, as its follower published it."""
        return self._meta.get(META_REASON, b"").decode("utf-8", "replace")

    @property
    def disk_problem(self) -> str:
        """The problem of the engine's disk, as its follower published it; "" if there is none."""
        return self._meta.get(META_DISK, b"").decode(errors="replace")

    @property
    def engine_start_s(self) -> float | None:
        """When the engine's process started, as the worker's follower published it."""
        return engine_start_s(self._meta)

    @property
    def cache(self) -> EngineCache:
        """The engine's description of its KV cache, as the worker's follower published it."""
        return engine_cache(self._meta)

    @property
    def declared_peer(self) -> PeerAddress | None:
        """Where the engine declares that it lends chunks, as the worker's follower published it."""
        return declared_peer_of(self._meta)

    @property
    def incidents(self) -> Incidents:
        """The incidents of the worker's whole life, as its follower counted them."""
        return Incidents(*map(self._number, (META_GAPS, META_CLEARS, META_RESYNCS)))

    def _writer(self, lease: int) -> str:
        """Return the token of the router that wrote the state under this lease, "" if the state does not name it."""
        value = self._meta.get(META_STATE_WRITER, b"")
        token = LeaseValue.token_of(value)
        return token if token is not None and value == LeaseValue(token, lease).value else ""

    def _number(self, field: str) -> int:
        """Return the number in this field of `meta`, 0 if it is missing or no number."""
        try:
            return keys.parse_number(self._meta.get(field, b"0"))
        except ValueError:
            return 0

    @property
    def places(self) -> list[Place]:
        """The places where the worker holds, or held, blocks."""
        return list(self._counts)

    def counts(self) -> dict[str, int]:
        """Return the number of blocks at each place, by the place's text."""
        return {place.text: count for place, count in sorted(self._counts.items(), key=lambda item: item[0].text)}
