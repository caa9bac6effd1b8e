# SPDX-License-Identifier: Apache-2.0
"""What the hooks of one engine core share: their reporter, and what waits for the next batch.

The engine's thread only collects; everything is translated in the reporter's thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvrouter.engine_patch.hooks import positions, resets
from kvrouter.engine_patch.hooks.declared_catalog import offload_groups, read_catalog
from kvrouter.engine_patch.hooks.offload_events import Handed, Offload, offloading_schedulers, simple_managers
from kvrouter.engine_patch.reporter.reporter_start import Reports
from kvrouter.engine_patch.reporter.translate import Notes, medium_name, translate, translate_offloaded
from kvrouter.engine_patch.setup.features import Features, misfit
from kvrouter.events.patch.messages import ReportCleared, ReportEvent

# Adapters a catalog names, those last used: more than an engine keeps loaded (`max_cpu_loras`), and some 100 KB.
MAX_LORAS = 1_024


class EventTap:
    """The tap of one publisher. Everything but `make_batch` runs in the engine's thread."""

    def __init__(self, reporter: Reports, features: Features, vllm_version: str, dp_rank: int) -> None:
        self.reporter = reporter
        self.features = features
        self.notes: Notes = {}
        self._vllm_version, self._dp_rank = vllm_version, dp_rank
        self._scheduler: Any = None
        self._lora_paths: dict[str, str] = {}
        self._handed: list[tuple[Offload, Handed]] = []
        self._batches = 0
        self._hashing_declared = False

    # What the publisher sends

    def published(self, batch: Any) -> None:
        """One batch went to vLLM's publisher: its seq is the number of batches before it, dropped ones too."""
        handed, self._handed = self._handed, []
        seq = self._batches
        self._batches += 1
        self.reporter.publish(partial(make_batch, batch.events, self.notes, handed), seq)

    def close(self) -> None:
        self.reporter.close()

    # What a scheduler's parts report

    def attach(self, scheduler: Any) -> None:
        """Hook a new scheduler, each part on its own, so that an unknown layout costs only that part."""
        self._scheduler = scheduler
        features = self.features
        features["positions"].install(fits, lambda: self._watch_stores(scheduler))
        features["resets"].install(fits, lambda: self._watch_resets(scheduler))
        features["offload"].install(fits, lambda: self._watch_offloads(scheduler))
        self.declare()
        features["lora"].install(
            lambda: misfit(scheduler, "add_request", ("request",)), lambda: self._watch_requests(scheduler)
        )

    def _watch_stores(self, scheduler: Any) -> None:
        for pool in block_pools(scheduler):
            positions.watch(pool, self.notes, self.features)

    def _watch_resets(self, scheduler: Any) -> None:
        for pool in block_pools(scheduler):
            self._watch_reset(pool, medium_name(getattr(pool, "medium", None)))
        for manager in simple_managers(scheduler.connector):
            # Its pool calls itself GPU; the events' medium is corrected when they are taken.
            self._watch_reset(manager.cpu_block_pool, medium_name(getattr(manager, "kv_event_medium", "CPU")))

    def _watch_offloads(self, scheduler: Any) -> None:
        groups = offload_groups(scheduler.kv_cache_manager.coordinator)
        for offload in offloading_schedulers(scheduler.connector):
            Offload(offload, groups, self.features, self._taken, self._report, self._cleared)

    def _watch_reset(self, pool: Any, medium: str) -> None:
        resets.watch(pool, medium, self.notes, self._cleared, self.features["resets"])

    def _cleared(self, medium: str, reason: str) -> None:
        cleared = [ReportCleared(medium, reason)]
        self.reporter.publish(lambda: cleared, None)

    def _taken(self, offload: Offload, handed: Handed) -> None:
        self._handed.append((offload, handed))

    def _report(self, offload: Offload, raw: list[Any]) -> None:
        self.reporter.publish(partial(make_batch, [], self.notes, [(offload, ([], raw))]), None)

    # The catalog

    def declare(self) -> None:
        """Read the catalog and pass it on; the reporter publishes it only when it differs."""
        feature = self.features["catalog"]
        if not feature.on or self._scheduler is None:
            return
        try:
            catalog = read_catalog(self._scheduler, self._lora_paths, self._vllm_version, self._dp_rank)
            self._hashing_declared = catalog.none_hash is not None
            self.reporter.declare(catalog)
        except Exception:
            feature.failed()

    def learn_lora(self, lora_request: Any) -> None:
        """An adapter is in use: its name and path go into block hashes."""
        name, path = lora_request.lora_name, lora_request.lora_path
        known = self._lora_paths.pop(name, None)
        self._lora_paths[name] = path
        if known != path:
            if len(self._lora_paths) > MAX_LORAS:
                del self._lora_paths[next(iter(self._lora_paths))]
            self.declare()

    def _watch_requests(self, scheduler: Any) -> None:
        original, feature = scheduler.add_request, self.features["lora"]

        def add_request(request: Any, *rest: Any, **named: Any) -> Any:
            if feature.on:
                try:
                    if not self._hashing_declared:
                        # The engine draws its NONE_HASH after its scheduler is built, and before the first request.
                        self.declare()
                        self._hashing_declared = True
                    if request.lora_request is not None:
                        self.learn_lora(request.lora_request)
                except Exception:
                    feature.failed()
            return original(request, *rest, **named)

        scheduler.add_request = add_request


def fits() -> str | None:
    """Nothing to check beforehand: a difference shows at the first use."""
    return None


def block_pools(scheduler: Any) -> list[Any]:
    """The pools that hold local prefix hits, each once: the device's, and a host pool of HiSparse."""
    manager = scheduler.kv_cache_manager
    return list(
        dict.fromkeys([manager.block_pool, *(single.block_pool for single in manager.coordinator.single_type_managers)])
    )


def make_batch(events: list[Any], notes: Notes, handed: list[tuple[Offload, Handed]]) -> list[ReportEvent]:
    """Translates one batch of vLLM's for our topic, in the reporter's thread."""
    left_out = {id(event) for _, (stock, _) in handed for event in stock}
    reported = translate(events, notes, left_out)
    for offload, (_, raw) in handed:
        reported += translate_offloaded(raw, offload.groups, offload.chunks.get)
    return reported
