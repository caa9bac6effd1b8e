# SPDX-License-Identifier: Apache-2.0
"""The state that the hooks of one engine core share: their reporter, and the events that wait for the next batch.

The engine's thread only collects events; the reporter's thread translates them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvrouter.engine_patch.hooks import positions, resets
from kvrouter.engine_patch.hooks.declared_catalog import offload_groups, read_catalog
from kvrouter.engine_patch.hooks.offload_events import Handed, Offload, offloading_schedulers, simple_managers
from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.reporter.reporter_start import Reports
from kvrouter.engine_patch.reporter.translate import Notes, medium_name, translate, translate_offloaded
from kvrouter.engine_patch.setup.features import Feature, Features, misfit
from kvrouter.events.patch.messages import DeclaredCatalog, ReportCleared, ReportEvent
from kvrouter.events.vllm.messages import GPU

# Adapters that a catalog names, the last used ones: more than an engine keeps loaded (`max_cpu_loras`), and some 100
# KB.
MAX_LORAS = 1_024


class EventTap:
    """The tap of one publisher, which runs in the engine's thread except for `make_batch`."""

    def __init__(self, reporter: Reports, features: Features, vllm_version: str, dp_rank: int) -> None:
        self.reporter = reporter
        self.features = features
        self.notes: Notes = {}
        self._vllm_version, self._dp_rank = vllm_version, dp_rank
        self._scheduler: Any = None
        # The catalog of cache groups that was last passed to the reporter.
        self._declared: DeclaredCatalog | None = None
        self._lora_paths: dict[str, str] = {}
        # The offloading events that belong to the next batch.
        self._handed: list[tuple[Offload, Handed]] = []
        # Batches that went to vLLM's publisher so far.
        self._batches = 0
        self._hashing_declared = False
        # Whether the offload tiers have a way to wake the engine, or need none.
        self.wakes = False
        self._limit_failures()

    def _limit_failures(self) -> None:
        """Withdraw from readers the blocks that a feature no longer keeps up to date once it is off."""
        features = self.features
        features["reports"].when_off(self._withhold_everything)
        # Without this feature, a block that is announced again is counted again, in whichever pool it is, and one
        # removal does not remove it.
        features["reuse"].when_off(self._withhold_everything)
        # Once this feature failed, vLLM reports the tiers with its own events, whose removals may name blocks that were
        # never reported as stored.
        features["offload"].when_off(self._withhold_tiers, if_failed=True)
        features["lora"].when_off(self._forget_loras, if_failed=True)

    def _withhold_everything(self, problem: str) -> None:
        self.reporter.withhold(Scope.EVERYTHING, problem)

    def _withhold_tiers(self, problem: str) -> None:
        self.reporter.withhold(Scope.TIERS, problem)

    # Batches of the publisher

    def published(self, batch: Any) -> None:
        """Queue the reports of one batch that went to vLLM's publisher.

        The batch's seq is the number of batches before it, including dropped ones.
        """
        offloads, self._handed = self._handed, []
        seq = self._batches
        self._batches += 1
        self.reporter.publish(partial(make_batch, batch.events, self.notes, offloads), seq)

    def close(self) -> None:
        """Close the reporter."""
        self.reporter.close()

    # Hooks in a scheduler's parts

    def attach(self, scheduler: Any) -> None:
        """Attach hooks to a new scheduler, each part separately, so that an unknown layout disables only that part."""
        self._scheduler = scheduler
        features = self.features
        for name, watch in (("positions", positions.watch), ("reuse", positions.watch_reuse)):
            features[name].install(fits, partial(self._watch_pools, scheduler, watch, features[name]))
        features["resets"].install(fits, lambda: self._watch_resets(scheduler))
        features["offload"].install(fits, lambda: self._watch_offloads(scheduler))
        self.declare()
        features["lora"].install(
            lambda: misfit(scheduler, "add_request", ("request",)), lambda: self._watch_requests(scheduler)
        )

    def _watch_pools(self, scheduler: Any, watch: Callable[[Any, Notes, Feature], None], feature: Feature) -> None:
        for pool in block_pools(scheduler):
            watch(pool, self.notes, feature)

    def _watch_resets(self, scheduler: Any) -> None:
        for pool in block_pools(scheduler):
            self._watch_reset(pool, medium_name(getattr(pool, "medium", None)))
        for manager in simple_managers(scheduler.connector):
            # The pool calls its own medium GPU; the medium of its events is corrected when the manager takes them.
            self._watch_reset(manager.cpu_block_pool, medium_name(getattr(manager, "kv_event_medium", "CPU")))

    def _watch_offloads(self, scheduler: Any) -> None:
        groups = offload_groups(scheduler.kv_cache_manager.coordinator)
        for offload in offloading_schedulers(scheduler.connector):
            self.features["offload_resets"].when_off(self._withhold_tiers)
            Offload(offload, groups, self.features, self._taken, self._report, self._offload_cleared)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Give the offload tiers a way to make an idle engine step, once."""
        self.wakes = True
        for offload in offloading_schedulers(self._scheduler.connector):
            if hasattr(offload.manager, "wake_with"):
                offload.manager.wake_with(wake)

    def _watch_reset(self, pool: Any, medium: str) -> None:
        if medium != GPU:
            # vLLM's own clear comes with the next step and names no medium, so readers would apply it to the GPU.
            self.features["resets"].when_off(self._withhold_tiers)
        resets.watch(pool, medium, self.notes, self._cleared, self.features["resets"])

    def _cleared(self, medium: str, reason: str) -> None:
        events = [ReportCleared(medium, reason)]
        self.reporter.publish(lambda: events, None)

    def _offload_cleared(self, medium: str, reason: str) -> None:
        self._cleared(medium, reason)
        # The catalog has the number of resets if the tier lends chunks.
        self.declare()

    def _taken(self, offload: Offload, handed: Handed) -> None:
        self._handed.append((offload, handed))

    def _report(self, offload: Offload, raw: list[Any]) -> None:
        self.reporter.publish(partial(make_batch, [], self.notes, [(offload, ([], raw))]), None)

    # The catalog

    def declare(self) -> None:
        """Read the catalog and pass it to the reporter, which publishes it only if it differs from the last one."""
        feature = self.features["catalog"]
        if not feature.on or self._scheduler is None:
            return
        try:
            catalog = read_catalog(self._scheduler, self._lora_paths, self._vllm_version, self._dp_rank)
            self._hashing_declared = catalog.none_hash is not None
            self._declared = catalog
            self.reporter.declare(catalog)
        except Exception:
            feature.failed()

    def learn_lora(self, lora_request: Any) -> None:
        """Note that an adapter is in use, and declare its path if that is new, as block hashes depend on it."""
        name, path = lora_request.lora_name, lora_request.lora_path
        known_path = self._lora_paths.pop(name, None)
        self._lora_paths[name] = path
        if known_path != path:
            if len(self._lora_paths) > MAX_LORAS:
                del self._lora_paths[next(iter(self._lora_paths))]
            self.declare()

    def _forget_loras(self, problem: str) -> None:
        """Stop crediting prompts of adapters.

        An adapter may have been loaded from another path since. With the declared path, prompts would be credited with
        blocks that they cannot use.
        """
        self._lora_paths.clear()
        if self._declared is not None:
            self._declared = msgspec.structs.replace(self._declared, lora_paths={})
            self.reporter.declare(self._declared)

    def _watch_requests(self, scheduler: Any) -> None:
        original, feature = scheduler.add_request, self.features["lora"]

        def add_request(request: Any, *rest: Any, **kwargs: Any) -> Any:
            if feature.on:
                try:
                    if not self._hashing_declared:
                        # The engine draws its NONE_HASH after its scheduler is built and before the first request.
                        self.declare()
                        self._hashing_declared = True
                    if request.lora_request is not None:
                        self.learn_lora(request.lora_request)
                except Exception:
                    feature.failed()
            return original(request, *rest, **kwargs)

        scheduler.add_request = add_request


def fits() -> str | None:
    """Return None: these places are not checked beforehand, because a difference shows at their first use."""
    return None


def block_pools(scheduler: Any) -> list[Any]:
    """Return the pools that hold local prefix hits, each once: the device's, and a host pool of HiSparse."""
    manager = scheduler.kv_cache_manager
    return list(
        dict.fromkeys([manager.block_pool, *(single.block_pool for single in manager.coordinator.single_type_managers)])
    )


def make_batch(events: list[Any], notes: Notes, handed: list[tuple[Offload, Handed]]) -> list[ReportEvent]:
    """Translate one batch of vLLM's events to events of the patch's topic; runs in the reporter's thread.

    Args:
        events: The batch's events.
        notes: Side notes about events; `translate` removes those that it uses.
        handed: Offloading events of the batch; the raw ones are reported in place of the connector's own.
    """
    left_out = {id(event) for _, (stock, _) in handed for event in stock}
    reported = translate(events, notes, left_out)
    for offload, (_, raw) in handed:
        reported += translate_offloaded(raw, offload.groups, offload.chunks.get)
    return reported
