# SPDX-License-Identifier: Apache-2.0
"""Every metric of the router, in one place, on a registry that is passed in.

Labels come from small closed sets: never a request id, a hash or a model text of a client. Worker names are printable,
short and at most MAX_WORKER_LABELS many; all further ones share the label `other`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.workers.stream_state import StreamState

STREAM_STATES = tuple(state.value for state in StreamState)

# How a worker came back to what its engine holds -> the field of its tally (router/ingest/counters.py) that counts it.
RESYNCS = {"replay": "replays", "snapshot": "snapshots", "relearned": "relearned"}

# Why a client's connection was closed: size or time of a head, time of a body, an answer that nobody read, too many
# connections, no HTTP.
CUT_REASONS = ("head_size", "head_time", "body_time", "send_time", "connections", "invalid")
LEASE_LOSSES = ("taken", "handed_over", "data_lost", "unreadable")
# Where a value in Redis was met that no router writes: in what is stored of a worker, the registry, the claims of
# routers.
UNREADABLE = ("worker", "registry", "claims")

# How a proxied request ended: ok, an engine's 4xx or 5xx passed on, the router's own refusal (its body, no worker), no
# engine that answered, an answer that broke off, a client that hung up, a defect of the router.
PROXY_OUTCOMES = ("ok", "client_error", "server_error", "refused", "unreachable", "cut", "client_gone", "bug")
# Of those, what says something of a worker.
ANSWER_OUTCOMES = ("ok", "client_error", "server_error")
# `proxy.failure.Kind` and `proxy.breaker.BreakerState`; a test holds them equal.
FAILURE_KINDS = ("refused", "connect_timeout", "stale", "reset", "lost", "silent", "malformed", "gone", "cut")
BREAKER_STATES = ("closed", "open", "half_open")

COMMIT_OUTCOMES = ("applied", "fenced", "stale", "failed")

# A fleet has tens to hundreds of workers. Each costs about 15 series here; unbounded, a client that registers in a loop
# would fill Prometheus.
MAX_WORKER_LABELS = 1_024
MAX_WORKER_LABEL_CHARS = 80
OTHER_WORKER = "other"

# A decision takes 10 us (hashes, warm) to some ms (32 k fresh tokens to hash); Prometheus' own buckets begin at 5 ms.
DECIDE_BUCKETS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 1e-1, 1.0)

# A tokenizer here takes 100 us to some tens of ms, an engine some ms to its deadline.
PROMPT_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 1.0, 2.5)
# Nearly all wait for nothing; those that wait, for as long as prompts take.
QUEUE_BUCKETS_S = (1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Why the chosen worker reuses less than the best one (choose.py), how a reservation ends, why a prompt is not placed.
LOST_REASONS = ("exclusion", "state", "load", "affinity", "temperature", "policy", "tier")
RESERVATION_ENDS = ("released", "expired", "no_room")
QUEUE_REFUSALS = ("full", "deadline")
# `disaggregation.Outcome`; a test holds them equal.
PREFILL_OUTCOMES = ("remote", "short", "cheaper_here", "saturated", "unavailable", "excluded", "request")
# Handed over, named to the decode worker's sidecar, no answer of the prefill worker, an error of it, an answer without
# a hand-over.
HANDOVER_OUTCOMES = ("done", "named", "failed", "refused", "declined")


class Metrics:
    """The metrics as attributes. Two instances on two registries live side by side in one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        # What `/metrics` answers: this process's numbers, unless there are siblings to be asked.
        self.page: Callable[[], Awaitable[bytes]] = self._own_page

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvrouter_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvrouter_{name}", text, labels, registry=registry)

        self.requests = counter("requests_total", "HTTP requests answered", "path", "code")
        self.connections_cut = counter(
            "http_connections_cut_total", "Connections closed for a client's fault", "reason"
        )
        self.internal_errors = counter("internal_errors_total", "Unhandled exceptions: each is a bug", "where")
        self.task_failures = counter(
            "task_failures_total", "Long-lived tasks that ended and were started again", "task"
        )
        self.unreadable_values = counter(
            "unreadable_values_total", "Values in Redis that no router writes, as they were met", "where"
        )
        self.decide_seconds = Histogram(
            "kvrouter_decide_seconds",
            "Time to answer a question of the API (/query, /select), without HTTP",
            buckets=DECIDE_BUCKETS_S,
            registry=registry,
        )

        self.ingest_batches = counter("ingest_batches_total", "Event batches taken in", "worker")
        self.ingest_events = counter("ingest_events_total", "Events taken in", "worker")
        self.ingest_blocks = counter("ingest_blocks_total", "Block hashes taken in, stored or removed", "worker")
        self.ingest_broken_events = counter("ingest_broken_events_total", "Events that did not decode", "worker")
        self.ingest_unknown_events = counter("ingest_unknown_events_total", "Events of an unknown type", "worker")
        self.ingest_refused_blocks = counter(
            "ingest_refused_blocks_total", "Blocks over a worker's own bounds: they earn no credit", "worker"
        )
        self.ingest_foreign_batches = counter(
            "ingest_foreign_batches_total",
            "Batches of another data-parallel rank: nothing of them is credited",
            "worker",
        )
        self.worker_unserved_models = gauge(
            "worker_unserved_models",
            "1 for a worker whose engine does not serve the model it is registered for",
            "worker",
        )
        self.worker_disk_corrupt_records = gauge(
            "worker_disk_corrupt_records",
            "Records that the disk below an engine's offload tier returned damaged, since the engine started",
            "worker",
        )
        self.mirror_refused_blocks = counter(
            "mirror_refused_blocks_total", "Blocks that found no room in memory: they earn no credit", "worker"
        )
        self.stream_gaps = counter("stream_gaps_total", "Gaps in the sequence of batches, filled or lost", "worker")
        self.stream_missed_batches = counter(
            "stream_missed_batches_total", "Batches that did not come by themselves, filled or lost", "worker"
        )
        self.stream_resyncs = counter(
            "stream_resyncs_total",
            "Ways back to what an engine holds: replay (missing batches filled), snapshot, relearned (all was dropped)",
            "worker",
            "how",
        )
        self.stream_ghost_blocks = counter(
            "stream_ghost_blocks_total", "Blocks that the index held and a snapshot of the same life did not", "worker"
        )
        self.stream_lost_blocks = counter(
            "stream_lost_blocks_total", "Blocks that a snapshot held and the index of the same life did not", "worker"
        )
        self.stream_event_lag_seconds = gauge(
            "stream_event_lag_seconds", "From the arrival of the last timed batch until answers showed it", "worker"
        )
        self.stream_restarts = counter("stream_restarts_total", "New lives of a worker's publisher", "worker")
        self.stream_engine_losses = counter(
            "stream_engine_losses_total", "Times that an engine that had answered over HTTP did not any more", "worker"
        )
        self.patch_heartbeats = counter(
            "patch_heartbeats_total", "Heartbeats of the engine patch compared with the index", "worker"
        )
        self.patch_mismatches = counter(
            "patch_mismatches_total", "Heartbeats that disagreed with the index: each led to a snapshot", "worker"
        )
        self.stream_state = gauge("stream_state", "1 for the state that a worker is in, else 0", "worker", "state")

        self.commit_lag_seconds = gauge(
            "commit_lag_seconds",
            "How long the oldest news of a worker that is followed here waits for the store",
            "worker",
        )
        self.backlog_blocks = gauge(
            "backlog_blocks", "Transitions of a worker that is followed here that wait for the store", "worker"
        )
        self.index_commits = counter("index_commits_total", "Commits to the store", "outcome")
        self.leases_lost = counter("leases_lost_total", "Workers that this process ceased to follow", "how")
        self.leases_held = gauge("leases_held", "Workers that this process follows; the others follow the rest")
        self.heartbeats_ignored = counter(
            "heartbeats_ignored_total", "Values among the routers' heartbeats in the store that are none"
        )
        self.routers = gauge("routers", "Router processes on the store, as this one sees them")
        self.recoveries_waiting = gauge(
            "recoveries_waiting", "Replays and snapshots that wait until fewer are under way"
        )
        self.index_rewrites = counter("index_rewrites_total", "Workers written to the store anew from memory", "worker")
        self.registry_repairs = counter("registry_repairs_total", "Registrations that were lost and written back")
        self.discovery_up = gauge("discovery_up", "1 while a source of workers can be read, else 0", "source")
        self.discovery_workers = gauge("discovery_workers", "Workers that a source shows, as last known", "source")
        self.discovery_waiting = gauge(
            "discovery_waiting", "Workers that a source shows and that are not registered: /health says why", "source"
        )
        self.discovery_contested = gauge(
            "discovery_contested", "Workers of a source of which another source or router says something else", "source"
        )
        self.discovery_conflicts = counter(
            "discovery_conflicts_total", "Times that a worker of a source came to be contested", "source"
        )
        self.discovery_changes = counter(
            "discovery_changes_total", "Workers that a source registered (also anew) or withdrew", "source", "change"
        )
        self.store_silent_seconds = gauge("store_silent_seconds", "How long the store has not answered, else 0")
        self.store_up = gauge("store_up", "1 while the store answers")
        self.mirror_entries = gauge("mirror_entries", "(worker, block) entries in memory")
        self.mirror_bytes = gauge("mirror_bytes", "Bytes of the index in memory")

        self.approximate_workers = gauge(
            "approximate_workers", "Workers without usable events, credited with what was sent there"
        )
        self.approximate_pieces = gauge("approximate_pieces", "Pieces of prompts remembered for those")

        self.prompts = counter("prompts_total", "Texts whose tokens were looked for", "source")
        self.prompts_unknown = counter(
            "prompts_unknown_total", "Texts whose tokens were not found, so that they were placed by load", "reason"
        )
        self.prompt_seconds = Histogram(
            "kvrouter_prompt_seconds",
            "Time to find the tokens of a text",
            ("source",),
            buckets=PROMPT_BUCKETS_S,
            registry=registry,
        )
        self.prompt_memory_hits = counter("prompt_memory_hits_total", "Texts whose tokens were remembered")
        self.prompt_memory_bytes = gauge("prompt_memory_bytes", "Bytes of remembered tokens of texts")
        self.token_mismatches = gauge(
            "token_mismatches", "Engines of which a tokenizer here, their /tokenize or their peers make other tokens"
        )
        self.choice_seconds = Histogram(
            "kvrouter_choice_seconds",
            "Time to choose a worker, for the proxy and /select: hashing, matching, comparing",
            buckets=DECIDE_BUCKETS_S,
            registry=registry,
        )
        self.achievable_hit_tokens = counter(
            "achievable_hit_tokens_total", "Hit tokens of each placed prompt at the worker with the longest hit of all"
        )
        self.chosen_hit_tokens = counter("chosen_hit_tokens_total", "Hit tokens of each placed prompt where it went")
        self.lost_hit_tokens = counter(
            "lost_hit_tokens_total", "What the best worker would have reused more than the chosen one, by why", "reason"
        )
        self.prefill_decisions = counter(
            "prefill_decisions_total",
            "Prompts of models with prefill workers, by where and why they are computed",
            "outcome",
        )
        self.handovers = counter(
            "handovers_total", "Prompts sent to a prefill worker first, by what came of it", "outcome"
        )
        self.reservations = counter("reservations_total", "Prompts whose load was counted")
        self.reservations_ended = counter("reservations_ended_total", "Reservations that ended, by how", "how")
        self.reservations_voided = counter(
            "reservations_voided_total", "Reservations that no longer count, as the engine said that it is idle"
        )
        self.reservations_held = gauge("reservations_held", "Reservations of this process")
        self.load_known = gauge("load_known", "1 while this process knows the load of the other routers, else 0")
        self.load_routers = gauge("load_routers", "Routers whose load this one counts, itself included")
        self.load_queued_tokens = gauge(
            "load_queued_tokens", "Prefill tokens queued at a worker, all routers", "worker"
        )
        self.load_decode_tokens = gauge(
            "load_decode_tokens", "Context tokens decoded at a worker, all routers", "worker"
        )
        self.load_requests = gauge("load_requests", "Requests in flight at a worker, as known here", "worker")
        self.load_saturated = gauge("load_saturated", "1 while a worker is saturated, else 0", "worker")
        self.queue_requests = gauge("queue_requests", "Prompts that wait, as all workers are saturated")
        self.queue_refused = counter("queue_refused_total", "Prompts that were not placed, by why", "reason")
        self.queue_seconds = Histogram(
            "kvrouter_queue_seconds",
            "Time that a placed prompt waited for a worker",
            buckets=QUEUE_BUCKETS_S,
            registry=registry,
        )

        self.segment_memory_bytes = gauge("segment_memory_bytes", "Bytes of remembered prompt segments")
        self.segment_hits = counter("segment_hits_total", "Prompt segments whose hashes were remembered")
        self.segment_misses = counter("segment_misses_total", "Prompt segments that were hashed")

        self.proxy_requests = counter("proxy_requests_total", "Proxied requests, by how they ended", "path", "outcome")
        self.proxy_answers = counter("proxy_answers_total", "Whole answers of an engine", "worker", "outcome")
        self.proxy_failures = counter(
            "proxy_failures_total",
            "Attempts at a worker that failed; the request may have gone to another",
            "worker",
            "kind",
        )
        self.proxy_retries = counter("proxy_retries_total", "Requests sent to another worker after a failure", "kind")
        self.proxy_open = gauge("proxy_open_requests", "Proxied requests under way")
        self.proxy_breaker_state = gauge(
            "proxy_breaker_state",
            "1 for the state that a worker's breaker is in, else 0; none: closed ever since",
            "worker",
            "state",
        )

        for outcome in COMMIT_OUTCOMES:
            self.index_commits.labels(outcome)
        for where in UNREADABLE:
            self.unreadable_values.labels(where)
        for reason in CUT_REASONS:
            self.connections_cut.labels(reason)
        for how in LEASE_LOSSES:
            self.leases_lost.labels(how)
        for reason in LOST_REASONS:
            self.lost_hit_tokens.labels(reason)
        for outcome in PREFILL_OUTCOMES:
            self.prefill_decisions.labels(outcome)
        for outcome in HANDOVER_OUTCOMES:
            self.handovers.labels(outcome)
        for how in RESERVATION_ENDS:
            self.reservations_ended.labels(how)
        for reason in QUEUE_REFUSALS:
            self.queue_refused.labels(reason)
        self.registry = registry
        self._measures: list[Callable[[], None]] = []
        self._forgetters: list[Callable[[str], None]] = []
        self._workers: dict[WorkerKey, str] = {}
        self._request_children: dict[tuple[str, int], Counter] = {}
        # Of the proxy's: to find a child costs more than to count.
        self._proxy_children: dict[tuple[str, str], Counter] = {}
        self._answer_children: dict[tuple[WorkerKey, str], Counter] = {}
        self._prompt_children: dict[str, tuple[Counter, Histogram]] = {}
        self.reservations_released = self.reservations_ended.labels("released")
        # Per-worker metrics, to drop a worker's series when it is unregistered.
        self._per_worker = (
            self.ingest_batches,
            self.ingest_events,
            self.ingest_blocks,
            self.ingest_broken_events,
            self.ingest_unknown_events,
            self.ingest_refused_blocks,
            self.ingest_foreign_batches,
            self.worker_unserved_models,
            self.worker_disk_corrupt_records,
            self.mirror_refused_blocks,
            self.stream_gaps,
            self.stream_restarts,
            self.patch_heartbeats,
            self.patch_mismatches,
            self.stream_engine_losses,
            self.stream_missed_batches,
            self.stream_ghost_blocks,
            self.stream_lost_blocks,
            self.stream_event_lag_seconds,
            self.index_rewrites,
            self.commit_lag_seconds,
            self.backlog_blocks,
            self.load_queued_tokens,
            self.load_decode_tokens,
            self.load_requests,
            self.load_saturated,
        )

    def before_page(self, measure: Callable[[], None]) -> None:
        """Has `measure` set its gauges whenever the numbers are read."""
        self._measures.append(measure)

    def own_page(self) -> bytes:
        """The numbers of this process, in Prometheus' text format."""
        for measure in self._measures:
            measure()
        return generate_latest(self.registry)

    async def _own_page(self) -> bytes:
        return self.own_page()

    def worker_label(self, worker: WorkerKey) -> str:
        """`w0`, or `w0@3` for another rank than 0; `other` once MAX_WORKER_LABELS are in use.

        Workers of two models with one id share a label."""
        label = self._workers.get(worker)
        if label is None:
            if len(self._workers) >= MAX_WORKER_LABELS:
                return OTHER_WORKER
            rank = f"@{worker.dp_rank}" if worker.dp_rank else ""
            name = "".join(c if c.isprintable() else "_" for c in worker.worker_id)
            label = name[: MAX_WORKER_LABEL_CHARS - len(rank)] + rank
            self._workers[worker] = label
        return label

    def set_stream_state(self, worker: WorkerKey, state: str) -> None:
        """Marks the one state that `worker` is in now."""
        label = self.worker_label(worker)
        for known in STREAM_STATES:
            self.stream_state.labels(label, known).set(1 if known == state else 0)

    def on_forget(self, forget: Callable[[str], None]) -> None:
        """Has `forget` drop the series of an unregistered worker's label too."""
        self._forgetters.append(forget)

    def forget_worker(self, worker: WorkerKey) -> None:
        """Drops the series of an unregistered worker, unless another worker shares its label."""
        for outcome in ANSWER_OUTCOMES:
            self._answer_children.pop((worker, outcome), None)
        label = self._workers.pop(worker, None)
        if label is None or label in self._workers.values():
            return
        # Old versions of prometheus-client raise for a series that never was.
        for metric in self._per_worker:
            with contextlib.suppress(KeyError):
                metric.remove(label)
        for forget in self._forgetters:
            forget(label)
        for gauge, values in (
            (self.stream_state, STREAM_STATES),
            (self.stream_resyncs, RESYNCS),
            (self.proxy_answers, ANSWER_OUTCOMES),
            (self.proxy_failures, FAILURE_KINDS),
            (self.proxy_breaker_state, BREAKER_STATES),
        ):
            for value in values:
                with contextlib.suppress(KeyError):
                    gauge.remove(label, value)

    def count_prompt(self, source: str, reason: str | None, seconds: float) -> None:
        """Counts one text by where its tokens came from, and by why they are not (all) known."""
        children = self._prompt_children.get(source)
        if children is None:
            children = self.prompts.labels(source), self.prompt_seconds.labels(source)
            self._prompt_children[source] = children
        children[0].inc()
        children[1].observe(seconds)
        if reason is not None:
            self.prompts_unknown.labels(reason).inc()

    def count_proxied(self, path: str, outcome: str) -> None:
        """Counts one proxied request that ended."""
        child = self._proxy_children.get((path, outcome))
        if child is None:
            child = self._proxy_children[path, outcome] = self.proxy_requests.labels(path, outcome)
        child.inc()

    def count_answer(self, worker: WorkerKey, outcome: str) -> None:
        """Counts one whole answer of an engine."""
        child = self._answer_children.get((worker, outcome))
        if child is None:
            child = self.proxy_answers.labels(self.worker_label(worker), outcome)
            self._answer_children[worker, outcome] = child
        child.inc()

    def count_request(self, path: str, code: int) -> None:
        """Counts one answer; `path` is a route's template, never the path as the client sent it."""
        child = self._request_children.get((path, code))
        if child is None:
            child = self._request_children[path, code] = self.requests.labels(path, str(code))
        child.inc()
