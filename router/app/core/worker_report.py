# SPDX-License-Identifier: Apache-2.0
"""The state of one worker as `/workers` and the metrics show it. Pure but for the metrics that it counts."""

from __future__ import annotations

import contextlib

import msgspec

from kvrouter.contract.worker_status import PatchStatus, PeerStatus, Recovery, WorkerStatus
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.mirror_sync import MirrorSync
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.stream_metrics import RESYNCS, StreamMetrics
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.model.workers.engine_cache import cache_problem
from kvrouter.router.model.workers.stream_state import HEARD, StreamState


def worker_status(follower: Follower, mirror: MirrorSync, unread: str | None, now: float) -> WorkerStatus:
    """Return the row of a worker in `/workers`.

    Args:
        follower: The worker's follower.
        mirror: Knows which blocks found no room in memory.
        unread: Why some logs in Redis cannot be followed; None if all can.
        now: The time on the router's monotonic clock.
    """
    state, view = follower.state, follower.state.view
    profile, registration = state.profile, state.registration
    catalog = profile.catalog
    reasons = (
        unread,
        view.reason,
        # An engine that has stored nothing yet shows no groups, which is no problem.
        catalog.problem if catalog.groups else None,
        mirror.lost_credit(state.worker),
        registration.note,
        state.note,
        state.refused,
        state.disk_problem,
        state.clears.problem(now),
        cache_problem(state.cache),
    )
    return WorkerStatus(
        worker_id=state.worker.worker_id,
        dp_rank=state.worker.dp_rank,
        model=state.worker.model,
        url=registration.url,
        state=view.state.value,
        state_age_s=round(now - state.since_s, 3),
        credited=view.credited,
        approximate=view.approximate,
        reason="; ".join(filter(None, reasons)),
        epoch=state.shown.epoch,
        seq=state.shown.seq,
        catalog=catalog.as_dict(),
        catalog_source=catalog.source,
        hash_scheme=profile.identity.label,
        residency=state.counts(),
        lag_ms=None if (lag_s := _lag_s(follower)) is None else round(lag_s * 1000, 3),
        gaps=state.incidents.gaps,
        recovery=Recovery(**{name: getattr(profile.tally, name) for name in Recovery.__struct_fields__}),
        last_event_age_s=_age_s(profile.contact.last_event_s, now),
        patch=_patch_status(profile, now),
        refused_blocks=profile.tally.refused + mirror.refused(state.worker),
        draining=registration.drains,
        draining_s=_age_s(state.drains_since_s, now),
        source=registration.source,
        role=registration.role.value,
        handover=registration.handover.value,
        engine=profile.engine.name,
        engine_cache=state.cache,
        peer=msgspec.UNSET if (peer := view.peer) is None else PeerStatus(peer.host, peer.port),
    )


def _lag_s(follower: Follower) -> float | None:
    """Return by how many seconds answers lag behind the worker's events; None while this process receives none."""
    state = follower.state
    return state.shown.lag_s if follower.lease.held and state.view.state in HEARD else None


def _age_s(then: float | None, now: float) -> float | None:
    return None if then is None else round(now - then, 3)


def _patch_status(profile: WorkerProfile, now: float) -> PatchStatus | None:
    if profile.patch.greeting is None:
        return None
    hello = profile.patch.greeting.hello
    return PatchStatus(
        version=hello.patch_version,
        epoch=profile.patch.epoch or hello.epoch,
        heartbeat_age_s=_age_s(profile.patch.last_heartbeat_s, now),
        heartbeats=profile.tally.heartbeats,
        mismatches=profile.tally.mismatches,
        snapshots=profile.tally.snapshots,
        features=hello.features,
    )


def count_worker(metrics: StreamMetrics, worker: WorkerKey, follower: Follower) -> None:
    """Add what a worker's stream brought since the last call to the counters, and set the gauges to its state."""
    state = follower.state
    tally, counted = state.ingest.profile.tally, state.counted
    resyncs = metrics.resyncs(worker)
    counters = [(field, counter(worker)) for field, counter in metrics.tallied.items()]
    for field, counter in counters + [(field, resyncs(how)) for how, field in RESYNCS.items()]:
        # The count of blocks refused for lack of room starts again at zero with a new epoch, so a difference may be
        # negative.
        counter.inc(max(0, getattr(tally, field) - getattr(counted, field)))
    labels = metrics.worker_labels(worker)
    if (lag_s := _lag_s(follower)) is not None:
        metrics.event_lag_seconds.labels(*labels).set(lag_s)
    else:
        with contextlib.suppress(KeyError):
            metrics.event_lag_seconds.remove(*labels)
    metrics.commit_lag_seconds(worker).set(follower.commits.unwritten_s)
    metrics.backlog_blocks(worker).set(follower.commits.unwritten_blocks)
    metrics.log_tail_blocks(worker).set(follower.commits.tail.blocks)
    metrics.disk_corrupt_records(worker).set(state.facts.offload.signs.corrupt)
    metrics.patch_withheld(worker).set(bool(state.ingest.profile.patch.problem))
    metrics.unserved_models(worker).set(bool(state.note))
    metrics.refusing_engines(worker).set(bool(state.refused))
    metrics.draining(worker).set(state.drains_since_s is not None)
    state.on_counted()
    for stream_state in StreamState:
        metrics.state(worker)(stream_state).set(stream_state is state.view.state)
