# SPDX-License-Identifier: Apache-2.0
"""The metrics of following workers: each worker's incoming events, the state of its stream, and its way to the store."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import WORKER, MetricRegistry
from kvrouter.router.index.store.commit import CommitOutcome
from kvrouter.router.model.workers.stream_state import StreamState

# The metric that shows each field of a worker's tally (`router/index/ingest/counters.py`).
TALLIED = {
    "batches": ("ingest_batches_total", "Event batches taken in"),
    "events": ("ingest_events_total", "Events taken in"),
    "blocks": ("ingest_blocks_total", "Block hashes taken in, stored or removed"),
    "broken": ("ingest_broken_events_total", "Events that did not decode"),
    "unknown": ("ingest_unknown_events_total", "Events of an unknown type"),
    "refused": ("ingest_refused_blocks_total", "Blocks over a worker's own bounds: they earn no credit"),
    "floods": ("ingest_floods_total", "Connections to event sources closed because they brought more than they may"),
    "foreign": ("ingest_foreign_batches_total", "Batches of another data-parallel rank: nothing of them is credited"),
    "gaps": ("stream_gaps_total", "Gaps in the sequence of batches, filled or lost"),
    "missed_batches": ("stream_missed_batches_total", "Batches that did not come by themselves, filled or lost"),
    "ghost_blocks": ("stream_ghost_blocks_total", "Blocks that the index held and a snapshot of the same life did not"),
    "lost_blocks": ("stream_lost_blocks_total", "Blocks that a snapshot held and the index of the same life did not"),
    "restarts": ("stream_restarts_total", "New lives of a worker's publisher"),
    "losses": ("stream_engine_losses_total", "Times that an engine that had answered over HTTP did not any more"),
    "heartbeats": ("patch_heartbeats_total", "Heartbeats of the engine patch compared with the index"),
    "mismatches": ("patch_mismatches_total", "Heartbeats that disagreed with the index: each led to a snapshot"),
}
# The field of a worker's tally that counts each way in which its index came to agree with the engine again.
RESYNCS = {"replay": "replays", "snapshot": "snapshots", "relearned": "relearned"}

FAILED = "failed"
COMMIT_OUTCOMES = (*(outcome.value for outcome in CommitOutcome), FAILED)
LEASE_LOSSES = ("taken", "handed_over", "data_lost", "unreadable")


class StreamMetrics:
    """The metrics that all streams of a process share."""

    def __init__(self, registry: MetricRegistry) -> None:
        counters, worker_gauge = registry.counters, registry.worker_gauge
        self.worker_labels = registry.worker_labels
        self.internal_errors = registry.internal_errors
        self.tallied = {field: registry.worker_counter(*named) for field, named in TALLIED.items()}
        self.resyncs = registry.worker_counters(
            "stream_resyncs_total",
            "Ways back to what an engine holds: replay (missing batches filled), snapshot, relearned (all was dropped)",
            how=RESYNCS,
        )
        self.state = registry.worker_gauges(
            "stream_state", "1 for the state that a worker is in, else 0", state=StreamState
        )
        self.event_lag_seconds = registry.gauge(
            "stream_event_lag_seconds", "From the arrival of the last timed batch until answers showed it", WORKER
        )
        self.disk_corrupt_records = worker_gauge(
            "worker_disk_corrupt_records",
            "Records that the disk below an engine's offload tier returned damaged, since the engine started",
        )
        self.unserved_models = worker_gauge(
            "worker_unserved_models", "1 for a worker whose engine does not serve the model it is registered for"
        )
        self.patch_withheld = worker_gauge(
            "patch_withheld",
            "1 for a worker whose engine patch failed in part and took back what it had reported, else 0",
        )
        self.refusing_engines = worker_gauge(
            "worker_refusing_engines", "1 for a worker whose engine answers this router's own requests with 401 or 403"
        )
        self.twins = worker_gauge(
            "worker_engines_twice", "1 for a worker whose engine and rank another worker of its model has, too"
        )
        self.draining = worker_gauge("worker_draining", "1 for a worker that takes no new requests because it drains")
        self.commit_lag_seconds = worker_gauge(
            "commit_lag_seconds", "How long the oldest news of a worker that is followed here waits for the store"
        )
        self.backlog_blocks = worker_gauge(
            "backlog_blocks", "Transitions of a worker that is followed here that wait for the store"
        )
        self.polls_unjudged = registry.counter(
            "engine_polls_unjudged_total",
            "Health checks whose deadline this process noticed too late: they say nothing of their engine",
        )
        self.commits = counters("index_commits_total", "Commits to the store", outcome=COMMIT_OUTCOMES)
        self.log_tail_blocks = worker_gauge(
            "log_tail_blocks",
            "Transitions of a worker that is followed here that its log has and its checkpoint has not",
        )
        self.checkpoints = registry.counter("index_checkpoints_total", "Checkpoints of workers written to the store")
        self.rewrites = registry.worker_counter("index_rewrites_total", "Workers written to the store anew from memory")
        self.leases_lost = counters("leases_lost_total", "Workers that this process ceased to follow", how=LEASE_LOSSES)
