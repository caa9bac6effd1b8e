# SPDX-License-Identifier: Apache-2.0
"""The metrics of a router as a whole, and those of the rooms that the core joins."""

from __future__ import annotations

import platform

from kvrouter.router.app.core.resident_blocks import ResidentBlocks
from kvrouter.router.base.common import compiled
from kvrouter.router.base.common.version import VERSION
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.streams.stream_metrics import StreamMetrics


class CoreMetrics:
    """The metrics that the core sets, and those of `streams`, `fleet` and `watch`, which it passes on."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.before_page = registry.before_page
        self.streams = StreamMetrics(registry)
        self.fleet = FleetMetrics(registry)
        self.watch = WatchMetrics(registry)
        self.leases_held = gauge("leases_held", "Workers that this process follows; the others follow the rest")
        self.recoveries_waiting = gauge(
            "recoveries_waiting", "Replays and snapshots that wait until fewer are under way"
        )
        self.routers = gauge("routers", "Router processes on the store, as this one sees them")
        self.store_silent_seconds = gauge("store_silent_seconds", "How long the store has not answered, else 0")
        self.approximate_pieces = gauge("approximate_pieces", "Pieces of prompts remembered for those")
        self.approximate_workers = gauge(
            "approximate_workers", "Workers without usable events, credited with what was sent there"
        )
        build = gauge("build_info", "1: what runs, by its labels", "version", "python", "compiled")
        build.labels(VERSION, platform.python_version(), "yes" if compiled.caution() is None else "no").set(1)
        self.resident_blocks = ResidentBlocks(registry)
        self.mirror_entries = gauge("mirror_entries", "(worker, block) entries in memory")
        self.mirror_bytes = gauge("mirror_bytes", "Bytes of the index in memory")
        self.segment_memory_bytes = gauge("segment_memory_bytes", "Bytes of remembered prompt segments")
        self.segment_hits = counter("segment_hits_total", "Prompt segments whose hashes were remembered")
        self.segment_misses = counter("segment_misses_total", "Prompt segments that were hashed")
