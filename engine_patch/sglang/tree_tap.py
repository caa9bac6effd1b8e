# SPDX-License-Identifier: Apache-2.0
"""Joins one SGLang scheduler's radix cache with its reporter.

Everything here runs in the scheduler's thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.reporter.reporter_start import Reports
from kvrouter.engine_patch.setup.features import Features
from kvrouter.engine_patch.sglang.rust_residency import RustResidency, is_rust_core, watch_rust
from kvrouter.engine_patch.sglang.tree_catalog import (
    UnknownTree,
    adapters_of,
    component_types,
    digests_after,
    digests_of,
    is_python_core,
    read_catalog,
    read_groups,
    seed_of,
)
from kvrouter.engine_patch.sglang.tree_residency import HOST, TreeResidency, reports_of, watch_tree, watch_values
from kvrouter.events.patch.messages import ReportCleared
from kvrouter.events.vllm.messages import GPU

BASE = "sglang.srt.mem_cache.unified_cache.components.base"

OTHER_CORE = "start the engine with SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python"
HOST_TIER_OF_RUST = f"the Rust core does not report what leaves its host tier (HiCache); {OTHER_CORE}"

# The effect of each feature's absence, by the feature's name, for the warning.
FEATURES = {
    "reports": "nothing is published for routers beyond SGLang's own events",
    "components": "routers follow SGLang's own events, which say nothing of windows and Mamba states: hybrid models earn "
    "no credit",
}


class TreeTap:
    """The tap of one scheduler, which reports after each step what its cache holds."""

    def __init__(self, cache: Any, reporter: Reports, features: Features) -> None:
        self._reporter = reporter
        self._feature = features["components"]
        self._page_tokens = 0
        self._declare: Callable[[], None] = lambda: None
        # The parts of the last catalog that may change: the host tier, and the number of adapters.
        self._shown = (False, 0)
        self._residency: TreeResidency | RustResidency | None = None
        self._cache = cache
        self._feature.when_off(self._withdraw)

    def attach(self, dp_rank: int, version: str, model: str | None) -> bool:
        """Follow the cache, and return whether it is followed; if not, the reason is logged."""
        self._feature.install(self._misfit, lambda: self._watch(dp_rank, version, model))
        if not self._feature.on:
            self.close()
        return self._feature.on

    def _misfit(self) -> str | None:
        core = getattr(self._cache, "tree_core", None)
        if core is None:
            return f"{type(self._cache).__name__} is no UnifiedRadixCache"
        if not is_python_core(core):
            if not is_rust_core(core):
                return f"{type(core).__name__} does not report what it frees; {OTHER_CORE}"
            if core.enable_hicache:
                return HOST_TIER_OF_RUST
            if core.total_size()[0]:
                return f"the Rust core does not list what it held before the patch; {OTHER_CORE}"
        try:
            read_groups(self._cache)
        except UnknownTree as error:
            return str(error)
        return None

    def _watch(self, dp_rank: int, version: str, model: str | None) -> None:
        core = self._cache.tree_core
        groups = read_groups(self._cache)
        self._page_tokens = int(core.page_size)
        if is_python_core(core):
            watch_values(importlib.import_module(BASE).ComponentData)
            self._residency = TreeResidency(groups, digests_of(core))
            watch_tree(core, self._residency, self._cleared, self._feature.failed)
        else:
            self._residency = RustResidency(core, component_types(self._cache), groups, seed_of, digests_after(core))
            watch_rust(core, self._residency, self._cleared, self._feature.failed)

        def declare() -> None:
            self._shown = (core.enable_hicache, len(adapters_of(core)))
            self._reporter.declare(read_catalog(self._cache, groups, dp_rank, version, model))

        self._declare = declare
        declare()

    def step(self) -> None:
        """Report the changes of a step that the scheduler has just published."""
        if self._residency is None or not self._feature.on:
            return
        try:
            core = self._cache.tree_core
            if core.enable_hicache and isinstance(self._residency, RustResidency):
                self._feature.off(HOST_TIER_OF_RUST)
                return
            if self._shown != (core.enable_hicache, len(adapters_of(core))):
                self._declare()
            changes = self._residency.take()
            if changes is not None:
                self._reporter.publish(partial(reports_of, changes, self._page_tokens), None)
        except Exception:
            self._feature.failed()

    def _cleared(self) -> None:
        if self._feature.on:
            events = [ReportCleared(medium, "the radix cache was reset") for medium in (GPU, HOST)]
            self._reporter.publish(lambda: events, None)

    def _withdraw(self, problem: str) -> None:
        """Withdraw from readers the blocks that are no longer kept up to date.

        Otherwise heartbeats would continue to vouch for these blocks.
        """
        if self._residency is not None:
            self._residency.end()
        self._reporter.withhold(Scope.EVERYTHING, problem)

    def close(self) -> None:
        """Close the reporter; called when the engine's own publisher ends."""
        self._reporter.close()
