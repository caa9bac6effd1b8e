# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of the tiers: the OffloadingManager that its OffloadingConnector calls in the scheduler's thread.

From 0.33 on, vLLM prepares the event of a chunk as soon as a look-up reports the chunk as pending. It learns from
`metadata_only` events which of these chunks never arrived, and it calls `on_reset_flushed` when its workers are done
with the slots that a reset freed. Older versions do not have these. `lock` keeps vLLM's default, because only the
scheduler's thread enters.
Source: vLLM 0.32 and 0.33 v1/kv_offload/base.py OffloadingManager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.metrics import COUNTERS, GAUGES, Sample
from kvrouter.engine_patch.offload.peer.peer_source import source_wish
from kvrouter.engine_patch.offload.slots import SlotsSpec
from kvrouter.engine_patch.offload.tiers.tiering import LookupAnswer, Medium, PromotionRequest, Tiering
from kvrouter.events.patch.messages import PeerAddress

# Features that the installed vLLM has.
TAKES_METADATA_ONLY = any(field.name == "metadata_only" for field in fields(base.OffloadingEvent))
# The source of a chunk from another engine, in vLLM's metrics.
FROM_PEER = getattr(CacheHitSource, "P2P", CacheHitSource.HOST)
TELLS_FLUSHES = hasattr(base.OffloadingManager, "on_reset_flushed")

# The owner of the disk tier on the wire, because events of a tier below the first name their owner.
DISK_OWNER = "kvrouter"

_ANSWERS = {
    LookupAnswer.UNKNOWN: base.LookupResult.RETRY,
    LookupAnswer.NO: base.LookupResult.MISS,
    LookupAnswer.SOON: base.LookupResult.HIT_PENDING,
    LookupAnswer.YES: base.LookupResult.HIT,
}


class HybridOffloadingManager(base.OffloadingManager):  # type: ignore[misc]
    """The scheduler's side of the tiers, as vLLM's connector calls it."""

    def __init__(
        self,
        tiering: Tiering,
        sample: Callable[[], Sample],
        close: Callable[[Tiering], None],
        shared_disk: bool = False,
        facts: Mapping[str, str | int] | None = None,
        peer_address: Callable[[], PeerAddress | None] = lambda: None,
    ) -> None:
        """Serve the tiers.

        Args:
            tiering: The tiers.
            sample: Returns the values of the metrics.
            close: Closes the tiers and releases their memory, at the shutdown.
            shared_disk: Whether another engine writes the disk.
            facts: Facts that never change, for `vllm:kv_offload_config_info`.
            peer_address: Returns where chunks are lent to other engines, None if they are not.
        """
        self._tiering = tiering
        self._disk_locality = base.Locality.REMOTE if shared_disk else base.Locality.LOCAL
        self._sample = sample
        self._close = close
        self._facts = dict(facts or {})
        # Called by the patch's hooks for the catalog that they declare (`hooks/offload_events.py`).
        self.peer_address = peer_address
        self._last = Sample()

    # Look-ups

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        """Return whether a chunk can be loaded now, soon or not, from the tiers that the request allows."""
        allowed = req_context.load_tier_filter
        if not allowed.allows(base.Medium.CPU, None):
            return base.LookupResult.MISS
        disk = allowed.allows(base.Medium.STORAGE, self._disk_locality)
        with self._tiering.lock:
            return _ANSWERS[self._tiering.look_up(key, _wish(req_context), disk)]

    def get_load_source(self, key: OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        """Return DISK for a chunk that was read from disk for this request, P2P for one of another engine, else HOST."""
        wish = _wish(req_context)
        if wish.peer is not None and key in wish.peer.pulled:
            return FROM_PEER
        return CacheHitSource.DISK if key in wish.promoted else CacheHitSource.HOST

    # Transfers

    def prepare_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> SlotsSpec:
        """Return the slots of ready chunks, which keep their slots until `complete_load`."""
        with self._tiering.lock:
            return SlotsSpec(self._tiering.begin_load(keys, _wish(req_context)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Let chunks be evicted again after their load."""
        with self._tiering.lock:
            self._tiering.end_load(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Return the chunks that are not in memory yet and a slot for each, or None if there is no room for all."""
        with self._tiering.lock:
            allocation = self._tiering.begin_store(keys, _wish(req_context))
        if allocation is None:
            return None
        stored, slots = allocation
        # Evicted keys are reported as events; the connector does not read this field.
        return base.PrepareStoreOutput(stored, SlotsSpec(slots), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: base.ReqContext, success: bool = True) -> None:
        """Make stored chunks loadable, or free their slots if the store failed."""
        with self._tiering.lock:
            self._tiering.end_store(keys, success)

    # Requests and steps

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Attach a `PromotionRequest` to the request, where `Tiering` notes the chunks that it needs, and its source."""
        wish = PromotionRequest()
        peers = self._tiering.peers
        given = (
            None
            if peers is None
            else source_wish(req_context.kv_transfer_params, getattr(req_context, "kv_hints", None))
        )
        if peers is not None and given is not None:
            wish.peer = peers.wish(given)
        req_context.set_state(wish)
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """End the request's waits for chunks."""
        with self._tiering.lock:
            self._tiering.forget(_wish(req_context))

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """End the step: collect finished disk jobs and start new ones."""
        with self._tiering.lock:
            self._tiering.end_step()

    def has_pending_work(self) -> bool:
        """Return whether the engine must step although no request runs."""
        with self._tiering.lock:
            return self._tiering.busy

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Take a function that makes an idle engine step, so that it announces what a hand-over brought."""
        self._tiering.wake = wake

    def reset_cache(self) -> None:
        """Forget all chunks; where vLLM reports flushes, read nothing from disk until `on_reset_flushed`."""
        with self._tiering.lock:
            self._tiering.reset(hold=TELLS_FLUSHES)

    def on_reset_flushed(self) -> None:
        """Allow reads from disk again, because the workers are done with the slots that the reset freed."""
        with self._tiering.lock:
            self._tiering.end_hold()

    def shutdown(self) -> None:
        """Close the tiers and release their memory."""
        # Without the lock, which the thread that lends may need for its last answer.
        self._close(self._tiering)

    # Events and metrics

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Yield the events of all changes since the last call."""
        with self._tiering.lock:
            changes, missed = self._tiering.take_changes(), self._tiering.take_missed()
        for change in changes:
            if change.medium is Medium.CPU:
                yield base.OffloadingEvent(change.keys, base.Medium.CPU, change.removed)
            else:
                yield base.OffloadingEvent(
                    change.keys, base.Medium.STORAGE, change.removed, self._disk_locality, DISK_OWNER
                )
        if TAKES_METADATA_ONLY and missed:
            yield base.OffloadingEvent(missed, base.Medium.CPU, True, metadata_only=True)

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        """Return the facts that never change, as one set of labels."""
        return [self._facts]

    def get_stats(self) -> OffloadingConnectorStats:
        """Return all gauges, and how much each counter grew since the last call."""
        stats = OffloadingConnectorStats()
        sample = self._sample()
        for name in GAUGES:
            stats.set_gauge(name, sample.gauges.get(name, 0.0))
        for name in COUNTERS:
            increase = sample.counters.get(name, 0) - self._last.counters.get(name, 0)
            if increase:
                stats.increase_counter(name, increase)
        self._last = sample
        return stats


def _wish(req_context: base.ReqContext) -> PromotionRequest:
    """Return the promotion request of a request, made if it has none yet."""
    wish: PromotionRequest | None = req_context.get_state(PromotionRequest)
    if wish is None:
        wish = PromotionRequest()
        req_context.set_state(wish)
    return wish
