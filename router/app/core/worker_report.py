# SPDX-License-Identifier: Apache-2.0
"""The state of one worker as `/workers` and the metrics show it. Pure but for the metrics that it counts."""

from __future__ import annotations

import contextlib

import msgspec

from kvrouter.contract.worker_status import PatchStatus, PeerStatus, Recovery, WorkerStatus
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.mirror_sync import MirrorSync
from kvrouter.router.follow.streams.stream_metrics import RESYNCS, StreamMetrics
from kvrouter.router.follow.streams.worker_stream import WorkerStream
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.model.workers.engine_cache import cache_problem
from kvrouter.router.model.workers.stream_state import HEARD, StreamState


def worker_status(stream: WorkerStream, mirror: MirrorSync, unread: str | None, now: float) -> WorkerStatus:
    """Return the row of a worker in `/workers`.

    Args:
        stream: The worker's stream.
        mirror: Knows which blocks found no room in memory.
        unread: Why some logs in Redis cannot be followed; None if all can.
        now: The time on the stream's clock.
    """
    profile, registration = stream.profile, stream.registration
    catalog = profile.catalog
    reasons = (
        unread,
        stream.view.reason,
        # An engine that has stored nothing yet shows no groups, which is no problem.
        catalog.problem if catalog.groups else None,
        mirror.lost_credit(stream.worker),
        registration.note,
        stream.note,
        stream.refused,
        stream.disk_problem,
        stream.clears_problem,
        cache_problem(stream.cache),
    )
    return WorkerStatus(
        worker_id=stream.worker.worker_id,
        dp_rank=stream.worker.dp_rank,
        model=stream.worker.model,
        url=registration.url,
        state=stream.view.state.value,
        state_age_s=round(now - stream.record.since_s, 3),
        credited=stream.view.credited,
        approximate=stream.view.approximate,
        reason="; ".join(filter(None, reasons)),
        epoch=stream.record.shown.epoch,
        seq=stream.record.shown.seq,
        catalog=catalog.as_dict(),
        catalog_source=catalog.source,
        hash_scheme=profile.identity.label,
        residency=stream.counts(),
        lag_ms=None if (lag_s := _lag_s(stream)) is None else round(lag_s * 1000, 3),
        gaps=stream.record.incidents.gaps,
        recovery=Recovery(**{name: getattr(profile.tally, name) for name in Recovery.__struct_fields__}),
        last_event_age_s=_age_s(profile.contact.last_event_s, now),
        patch=_patch_status(profile, now),
        refused_blocks=profile.tally.refused + mirror.refused(stream.worker),
        draining=registration.drains,
        draining_s=_age_s(stream.drains_since_s, now),
        source=registration.source,
        role=registration.role.value,
        handover=registration.handover.value,
        engine=profile.engine.name,
        engine_cache=stream.cache,
        peer=msgspec.UNSET if (peer := stream.view.peer) is None else PeerStatus(peer.host, peer.port),
    )


def _lag_s(stream: WorkerStream) -> float | None:
    """Return by how many seconds answers lag behind the worker's events; None while this process receives none."""
    return stream.record.shown.lag_s if stream.held and stream.view.state in HEARD else None


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


def count_worker(metrics: StreamMetrics, worker: WorkerKey, stream: WorkerStream) -> None:
    """Add what a worker's stream received since the last call to the counters, and set the gauges to its state."""
    tally, counted = stream.ingest.profile.tally, stream.counted
    resyncs = metrics.resyncs(worker)
    counters = [(field, counter(worker)) for field, counter in metrics.tallied.items()]
    for field, counter in counters + [(field, resyncs(how)) for how, field in RESYNCS.items()]:
        # The count of blocks refused for lack of room starts again at zero with a new epoch, so a difference may be
        # negative.
        counter.inc(max(0, getattr(tally, field) - getattr(counted, field)))
    labels = metrics.worker_labels(worker)
    if (lag_s := _lag_s(stream)) is not None:
        metrics.event_lag_seconds.labels(*labels).set(lag_s)
    else:
        with contextlib.suppress(KeyError):
            metrics.event_lag_seconds.remove(*labels)
    metrics.commit_lag_seconds(worker).set(stream.commits.unwritten_s)
    metrics.backlog_blocks(worker).set(stream.commits.unwritten_blocks)
    metrics.log_tail_blocks(worker).set(stream.commits.tail.blocks)
    metrics.disk_corrupt_records(worker).set(stream.record.facts.offload.signs.corrupt)
    metrics.patch_withheld(worker).set(bool(stream.ingest.profile.patch.problem))
    metrics.unserved_models(worker).set(bool(stream.note))
    metrics.refusing_engines(worker).set(bool(stream.refused))
    metrics.draining(worker).set(stream.drains_since_s is not None)
    stream.counted = msgspec.structs.replace(tally)
    for state in StreamState:
        metrics.state(worker)(state).set(state is stream.view.state)
