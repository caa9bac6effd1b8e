# SPDX-License-Identifier: Apache-2.0
"""Reports what the OffloadingConnector's manager does from its raw events, with group, hash form and positions as for
the GPU.

The connector's own KV events go to vLLM's topic unchanged, and are left out of ours. Events that are taken early, at a
reset, are held and returned at the next take in the same order, so that vLLM's topic stays the same.
Sources: vLLM 0.20 to 0.33 distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, events.py;
v1/kv_offload/base.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kvrouter.engine_patch.hooks.positions import hash_before
from kvrouter.engine_patch.reporter.translate import Chunk, OffloadGroup, medium_name
from kvrouter.engine_patch.setup.features import Feature, Features, misfit

CPU = "CPU"
REASON = "connector reset"
# Chunks whose transfer may be under way, or whose next tier may still report them: some hundred bytes each, kept twice.
MAX_CHUNKS = 16_384


class ChunkSizes(NamedTuple):
    """How one group's chunks are cut: tokens, and hashes of the request a chunk."""

    chunk_tokens: int
    chunk_hashes: int
    block_tokens: int


class ChunkTable:
    """Key -> what was known when its transfer began. Bounded: when the young half is full it becomes the old one."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max = max_chunks
        self._young: dict[bytes, Chunk] = {}
        self._old: dict[bytes, Chunk] = {}

    def add(self, key: bytes, chunk: Chunk) -> None:
        if len(self._young) >= self._max:
            self._old, self._young = self._young, {}
        self._young[key] = chunk

    def get(self, key: bytes) -> Chunk | None:
        return self._young.get(key) or self._old.get(key)


# The connector's own events of a step, and the raw ones that stand for them on our topic.
Handed = tuple[list[Any], list[Any]]


class Offload:
    """One OffloadingConnector's scheduler side. Reports in the engine's thread: `taken` with the next batch, `report`
    (raw events) and `cleared` at once."""

    def __init__(
        self,
        scheduler: Any,
        groups: Mapping[int, OffloadGroup],
        features: Features,
        taken: Callable[[Offload, Handed], None],
        report: Callable[[Offload, list[Any]], None],
        cleared: Callable[[str, str], None],
    ) -> None:
        self.groups = groups
        self.chunks = ChunkTable()
        self._taken, self._report, self._cleared = taken, report, cleared
        # Taken from the manager at a reset and not yet handed on to vLLM's topic; ours has them, or is past them.
        self._held: list[Any] = []
        # Whether the manager requested a step when these were taken from it.
        self._owed = False
        self._raw: list[Any] = []
        self._watching = False
        manager = scheduler.manager
        self._take_raw: Callable[[], Iterable[Any]] = manager.take_events
        self._pending: Callable[[], bool] = getattr(manager, "has_pending_work", bool)
        self._primary = medium_name(getattr(getattr(manager, "primary_tier", manager), "medium", CPU))
        features["offload"].install(
            lambda: misfit(manager, "take_events", ()) or misfit(scheduler, "take_events", ()),
            lambda: self._watch_events(scheduler, manager, features["offload"]),
        )
        if hasattr(scheduler, "reset_cache"):
            features["offload_resets"].install(
                lambda: misfit(scheduler, "reset_cache", ()),
                lambda: self._watch_reset(scheduler, features["offload_resets"]),
            )
        tracker = getattr(scheduler, "_events_tracker", None)
        if tracker is None:
            # Before 0.24 a chunk's position is unknown; the group and the hash are in its key.
            features["offload_positions"].off("this vLLM has no OffloadingEventsTracker")
        else:
            sizes = {config.group_idx: chunk_sizes(config) for config in scheduler.config.kv_group_configs}
            self._watch_stores(tracker, sizes, features["offload_positions"])

    def _watch_events(self, scheduler: Any, manager: Any, feature: Feature) -> None:
        take_stock = scheduler.take_events

        def take_raw_events() -> Iterator[Any]:
            held, self._held = self._held, []
            fresh = list(self._take_raw())
            self._raw += fresh
            return iter(held + fresh)

        def take_events() -> Iterator[Any]:
            stock = list(take_stock())
            raw, self._raw = self._raw, []
            if feature.on and (stock or raw):
                try:
                    self._taken(self, (stock, raw))
                except Exception:
                    feature.failed()
            # An iterator as before: the scheduler tests its truth value.
            return iter(stock)

        def has_pending_work() -> bool:
            # Taking its events must not keep a manager from stepping an idle engine.
            return bool(self._pending() or (self._owed and self._held))

        manager.take_events = take_raw_events
        manager.has_pending_work = has_pending_work
        scheduler.take_events = take_events
        self._watching = True

    def _watch_reset(self, scheduler: Any, feature: Feature) -> None:
        original = scheduler.reset_cache

        def reset_cache(*given: Any, **named: Any) -> Any:
            result = original(*given, **named)
            if feature.on:
                try:
                    if self._watching:  # else no take would return them
                        self._hold()
                except Exception:
                    feature.failed()
                try:
                    # Also after a failure: cleared blocks must not stay in the ledger.
                    self._cleared(self._primary, REASON)
                except Exception:
                    feature.failed()
            return result

        scheduler.reset_cache = reset_cache

    def _hold(self) -> None:
        """The manager emptied its primary tier, with or without an event. Events with an owner belong to another tier
        and are reported now."""
        self._owed = self._pending()
        fresh = list(self._take_raw())
        self._held += fresh
        if others := [event for event in fresh if not self._is_primary(event)]:
            self._report(self, others)

    def _is_primary(self, event: Any) -> bool:
        return getattr(event, "ownership", None) is None and medium_name(event.medium) == self._primary

    def _watch_stores(self, tracker: Any, sizes: Mapping[int, ChunkSizes], feature: Feature) -> None:
        def check(name: str) -> str | None:
            problem = misfit(tracker, name, ("req", "group_config"))
            return problem or misfit_tail(tracker, name)

        def apply(name: str, chunk_of: Callable[[Any, ChunkSizes, int], Chunk]) -> None:
            original = getattr(tracker, name)

            def record(req: Any, group_config: Any, where: int, offload_key: bytes) -> Any:
                result = original(req, group_config, where, offload_key)
                if feature.on:
                    try:
                        self.chunks.add(offload_key, chunk_of(req, sizes[group_config.group_idx], where))
                    except Exception:
                        feature.failed()
                return result

            setattr(tracker, name, record)

        feature.install(lambda: check("record_store"), lambda: apply("record_store", whole_chunk))
        if hasattr(tracker, "record_partial_store"):
            feature.install(lambda: check("record_partial_store"), lambda: apply("record_partial_store", partial_chunk))


def misfit_tail(tracker: Any, name: str) -> str | None:
    """The scheduler passes four arguments by place; their names differ between versions."""
    found = inspect.signature(getattr(tracker, name)).parameters
    return None if len(found) == 4 else f"OffloadingEventsTracker.{name} takes {len(found)} arguments, not 4"


def chunk_sizes(config: Any) -> ChunkSizes:
    """From a GroupOffloadConfig of 0.26 and later, or of before."""
    if hasattr(config, "tokens_per_chunk"):
        return ChunkSizes(config.tokens_per_chunk, config.hashes_per_chunk, config.tokens_per_block)
    return ChunkSizes(config.offloaded_block_size, config.hash_block_size_factor, config.gpu_block_size)


def whole_chunk(request: Any, sizes: ChunkSizes, chunk_idx: int) -> Chunk:
    end = (chunk_idx + 1) * sizes.chunk_tokens
    hash_tokens = sizes.chunk_tokens // sizes.chunk_hashes
    return Chunk(end, sizes.block_tokens, hash_before(request, end, sizes.block_tokens, hash_tokens), lora_of(request))


def partial_chunk(request: Any, sizes: ChunkSizes, boundary_tokens: int) -> Chunk:
    """A recurrent state inside a block: its hash is that of one hash unit."""
    hash_tokens = sizes.chunk_tokens // sizes.chunk_hashes
    parent_hash = hash_before(request, boundary_tokens, hash_tokens, hash_tokens)
    return Chunk(boundary_tokens, hash_tokens, parent_hash, lora_of(request))


def lora_of(request: Any) -> str | None:
    lora = request.lora_request
    return None if lora is None else lora.lora_name


def offloading_schedulers(connector: Any) -> Iterator[Any]:
    """The scheduler sides of a connector's OffloadingConnectors: its own, or those inside a MultiConnector."""
    scheduler = getattr(connector, "connector_scheduler", None)
    if hasattr(scheduler, "manager") and hasattr(scheduler, "take_events"):
        yield scheduler
    for inner in getattr(connector, "_connectors", ()):
        yield from offloading_schedulers(inner)


def simple_managers(connector: Any) -> Iterator[Any]:
    """The scheduler sides of SimpleCPUOffloadConnectors: they keep their blocks in a pool of vLLM's own kind."""
    manager = getattr(connector, "scheduler_manager", None)
    if hasattr(manager, "cpu_block_pool"):
        yield manager
    for inner in getattr(connector, "_connectors", ()):
        yield from simple_managers(inner)


def blocks_per_chunk(connector: Any) -> int | None:
    """Blocks that the offload tier keeps as one; None without an OffloadingConnector."""
    for scheduler in offloading_schedulers(connector):
        config = scheduler.config
        return int(config.blocks_per_chunk if hasattr(config, "blocks_per_chunk") else config.block_size_factor)
    return None


def suffix_partial_hits(connector: Any) -> bool | None:
    """Whether a SimpleCPUOffloadConnector's hits may end inside a block; None without one."""
    for manager in simple_managers(connector):
        return bool(getattr(manager.cpu_coordinator, "enable_partial_hash_hits", False))
    return None


def connector_name(connector: Any) -> str:
    """The class's name, as vLLM's registry has it. What is neither vLLM's nor ours may look blocks up as it likes, so a
    connector, or the manager of an OffloadingConnector, from elsewhere is named with its module."""
    name = _class_name(connector)
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    inner = "" if manager is None else _class_name(manager)
    return f"{name} with {inner}" if "." in inner else name


def _class_name(thing: Any) -> str:
    found = type(thing)
    known = found.__module__.startswith(("vllm.", "kvrouter.engine_patch."))
    return found.__name__ if known else f"{found.__module__}.{found.__name__}"


def connector_names(connector: Any) -> list[str]:
    """It and, where it is a MultiConnector, those inside."""
    inner = [name for child in getattr(connector, "_connectors", ()) for name in connector_names(child)]
    return [connector_name(connector), *inner]
