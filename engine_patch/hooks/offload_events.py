# SPDX-License-Identifier: Apache-2.0
"""Reports the actions of the OffloadingConnector's manager from the manager's raw events.

The reports have a group, a hash form and positions like those of the GPU. The connector's own KV events go to vLLM's
topic unchanged, and are left out of the patch's topic. Events that are taken early, at a reset, are held and returned
at the next take in the same order, so that vLLM's topic stays the same.
Sources: vLLM 0.20 to 0.33 distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py, events.py;
v1/kv_offload/base.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from kvrouter.engine_patch.hooks.positions import hash_before
from kvrouter.engine_patch.reporter.translate import Chunk, OffloadGroup, medium_name
from kvrouter.engine_patch.setup.features import Feature, Features, misfit
from kvrouter.events.patch.messages import PeerAddress

CPU = "CPU"
REASON = "connector reset"
# Chunks whose transfer may be under way, or which a lower tier may still report: some hundred bytes each, and up to
# twice this number is kept.
MAX_CHUNKS = 16_384


class ChunkSizes(NamedTuple):
    """The sizes of one group's chunks."""

    # Tokens of a chunk.
    chunk_tokens: int
    # Hashes of the request in a chunk.
    chunk_hashes: int
    # Tokens of a block.
    block_tokens: int


class ChunkTable:
    """The facts known of a chunk when its transfer began, by key.

    The table is bounded: when the young half is full it becomes the old half, and the former old half is dropped.
    """

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        """Start empty; `max_chunks` is the size of one half."""
        self._max = max_chunks
        self._young: dict[bytes, Chunk] = {}
        self._old: dict[bytes, Chunk] = {}

    def add(self, key: bytes, chunk: Chunk) -> None:
        """Add a chunk to the young half."""
        if len(self._young) >= self._max:
            self._old, self._young = self._young, {}
        self._young[key] = chunk

    def get(self, key: bytes) -> Chunk | None:
        """Return the facts of a chunk, or None if they are unknown or were dropped."""
        return self._young.get(key) or self._old.get(key)


# (the connector's own events of a step, the raw events that replace them on the patch's topic)
Handed = tuple[list[Any], list[Any]]


class Offload:
    """The scheduler side of one OffloadingConnector, whose events it reports from the engine's thread."""

    def __init__(
        self,
        scheduler: Any,
        groups: Mapping[int, OffloadGroup],
        features: Features,
        taken: Callable[[Offload, Handed], None],
        report: Callable[[Offload, list[Any]], None],
        cleared: Callable[[str, str], None],
    ) -> None:
        """Wrap methods of the connector's scheduler side and of its manager.

        Args:
            scheduler: The connector's scheduler side.
            groups: Group facts by group_idx.
            features: The patch's features.
            taken: Receives the events of a step, for the next batch.
            report: Receives raw events that are to be reported at once.
            cleared: Receives medium and reason of a clear that is to be reported at once.
        """
        self.groups = groups
        self.chunks = ChunkTable()
        self._taken, self._report, self._cleared = taken, report, cleared
        # Events taken from the manager at a reset and not yet passed on to vLLM's topic. The patch's topic has reported
        # them already, or the clear covers them.
        self._held: list[Any] = []
        # Whether the manager had pending work when the held events were taken from it.
        self._owed = False
        # Raw events taken since the connector's own events were last taken.
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
            # Before 0.24 a chunk's position is unknown; its group and its hash are in its key.
            features["offload_positions"].off("this vLLM has no OffloadingEventsTracker")
        else:
            sizes = {config.group_idx: chunk_sizes(config) for config in scheduler.config.kv_group_configs}
            self._watch_stores(tracker, sizes, features["offload_positions"])

    def _watch_events(self, scheduler: Any, manager: Any, feature: Feature) -> None:
        take_stock = scheduler.take_events

        def take_raw_events() -> Iterator[Any]:
            held_events, self._held = self._held, []
            new_events = list(self._take_raw())
            self._raw += new_events
            return iter(held_events + new_events)

        def take_events() -> Iterator[Any]:
            stock_events = list(take_stock())
            raw_events, self._raw = self._raw, []
            if feature.on and (stock_events or raw_events):
                try:
                    self._taken(self, (stock_events, raw_events))
                except Exception:
                    feature.failed()
            # The result is an iterator, as in vLLM, because the scheduler tests its truth value.
            return iter(stock_events)

        def has_pending_work() -> bool:
            # A manager that wants an idle engine to step must still get that step after its events were taken early.
            return bool(self._pending() or (self._owed and self._held))

        manager.take_events = take_raw_events
        manager.has_pending_work = has_pending_work
        scheduler.take_events = take_events
        self._watching = True

    def _watch_reset(self, scheduler: Any, feature: Feature) -> None:
        original = scheduler.reset_cache

        def reset_cache(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if feature.on:
                try:
                    if self._watching:  # Otherwise no take would return the held events.
                        self._hold()
                except Exception:
                    feature.failed()
                try:
                    # Report the clear even after a failure, because cleared blocks must not stay in the ledger.
                    self._cleared(self._primary, REASON)
                except Exception:
                    feature.failed()
            return result

        scheduler.reset_cache = reset_cache

    def _hold(self) -> None:
        """Take and hold the manager's events after it emptied its primary tier, with or without an event of its own.

        Events with an owner belong to another tier and are reported at once.
        """
        self._owed = self._pending()
        events = list(self._take_raw())
        self._held += events
        if other_tier_events := [event for event in events if not self._is_primary(event)]:
            self._report(self, other_tier_events)

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
    """Return how the method differs from one of four arguments, or None if it has four.

    The scheduler passes the arguments by position, so their names may differ between versions.
    """
    parameters = inspect.signature(getattr(tracker, name)).parameters
    return None if len(parameters) == 4 else f"OffloadingEventsTracker.{name} takes {len(parameters)} arguments, not 4"


def chunk_sizes(config: Any) -> ChunkSizes:
    """Return the sizes from a GroupOffloadConfig, whose fields were renamed in 0.26."""
    if hasattr(config, "tokens_per_chunk"):
        return ChunkSizes(config.tokens_per_chunk, config.hashes_per_chunk, config.tokens_per_block)
    return ChunkSizes(config.offloaded_block_size, config.hash_block_size_factor, config.gpu_block_size)


def whole_chunk(request: Any, sizes: ChunkSizes, chunk_idx: int) -> Chunk:
    """Return the facts of a request's chunk that is stored whole."""
    end = (chunk_idx + 1) * sizes.chunk_tokens
    hash_tokens = sizes.chunk_tokens // sizes.chunk_hashes
    return Chunk(end, sizes.block_tokens, hash_before(request, end, sizes.block_tokens, hash_tokens), lora_of(request))


def partial_chunk(request: Any, sizes: ChunkSizes, boundary_tokens: int) -> Chunk:
    """Return the facts of a recurrent state inside a block, whose hash is that of one hash unit."""
    hash_tokens = sizes.chunk_tokens // sizes.chunk_hashes
    parent_hash = hash_before(request, boundary_tokens, hash_tokens, hash_tokens)
    return Chunk(boundary_tokens, hash_tokens, parent_hash, lora_of(request))


def lora_of(request: Any) -> str | None:
    """Return the name of a request's adapter, or None without one."""
    lora = request.lora_request
    return None if lora is None else lora.lora_name


def offloading_schedulers(connector: Any) -> Iterator[Any]:
    """Yield the scheduler sides of a connector's OffloadingConnectors: its own, or those inside a MultiConnector."""
    scheduler = getattr(connector, "connector_scheduler", None)
    if hasattr(scheduler, "manager") and hasattr(scheduler, "take_events"):
        yield scheduler
    for inner in getattr(connector, "_connectors", ()):
        yield from offloading_schedulers(inner)


def simple_managers(connector: Any) -> Iterator[Any]:
    """Yield the scheduler sides of SimpleCPUOffloadConnectors, which keep their blocks in a pool of vLLM's own kind."""
    manager = getattr(connector, "scheduler_manager", None)
    if hasattr(manager, "cpu_block_pool"):
        yield manager
    for inner in getattr(connector, "_connectors", ()):
        yield from simple_managers(inner)


def blocks_per_chunk(connector: Any) -> int | None:
    """Return how many blocks the offload tier keeps as one chunk, or None without an OffloadingConnector."""
    for scheduler in offloading_schedulers(connector):
        config = scheduler.config
        return int(config.blocks_per_chunk if hasattr(config, "blocks_per_chunk") else config.block_size_factor)
    return None


def peer_address(connector: Any) -> PeerAddress | None:
    """Return where this project's offload tier lends its chunks, or None if it lends none or is not there."""
    for scheduler in offloading_schedulers(connector):
        address = getattr(scheduler.manager, "peer_address", None)
        return None if address is None else cast("PeerAddress | None", address())
    return None


def suffix_partial_hits(connector: Any) -> bool | None:
    """Return whether a SimpleCPUOffloadConnector's hits may end inside a block, or None without such a connector."""
    for manager in simple_managers(connector):
        return bool(getattr(manager.cpu_coordinator, "enable_partial_hash_hits", False))
    return None


def connector_name(connector: Any) -> str:
    """Return the name of the connector's class, as vLLM's registry has it.

    A class from elsewhere than vLLM and this patch may look blocks up in its own way. Such a connector is therefore
    named with its module, and an OffloadingConnector with such a manager is named with that manager.
    """
    name = _class_name(connector)
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    inner = "" if manager is None else _class_name(manager)
    return f"{name} with {inner}" if "." in inner else name


def _class_name(instance: Any) -> str:
    cls = type(instance)
    is_known = cls.__module__.startswith(("vllm.", "kvrouter.engine_patch."))
    return cls.__name__ if is_known else f"{cls.__module__}.{cls.__name__}"


def connector_names(connector: Any) -> list[str]:
    """Return the connector's name and, for a MultiConnector, the names of the connectors inside it."""
    inner = [name for child in getattr(connector, "_connectors", ()) for name in connector_names(child)]
    return [connector_name(connector), *inner]
