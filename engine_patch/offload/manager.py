# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of the tiers: the OffloadingManager that its OffloadingConnector calls in the scheduler's thread.

From 0.33 on, vLLM notes of a chunk what its event will say as soon as a look-up finds it on its way, learns from
`metadata_only` which of them never came, and says when its workers are done with what a reset freed. Where it does not
have these, they are left out. `lock` stays its default: nothing but the scheduler's thread enters.
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
from kvrouter.engine_patch.offload.slots import SlotsSpec
from kvrouter.engine_patch.offload.tiers.tiering import LookupAnswer, Medium, PromotionRequest, Tiering

# What this vLLM has.
TAKES_METADATA_ONLY = any(one.name == "metadata_only" for one in fields(base.OffloadingEvent))
TELLS_FLUSHES = hasattr(base.OffloadingManager, "on_reset_flushed")

# Whose disk it is, on the wire: events of a tier below the first name their owner.
DISK_OWNER = "kvrouter"

_ANSWERS = {
    LookupAnswer.NO: base.LookupResult.MISS,
    LookupAnswer.SOON: base.LookupResult.HIT_PENDING,
    LookupAnswer.YES: base.LookupResult.HIT,
}


class HybridOffloadingManager(base.OffloadingManager):  # type: ignore[misc]
    """shared_disk: whether another engine writes the disk; release: called last, at the shutdown; facts: what never
    changes, for `vllm:kv_offload_config_info`."""

    def __init__(
        self,
        tiering: Tiering,
        sample: Callable[[], Sample],
        release: Callable[[], None],
        shared_disk: bool = False,
        facts: Mapping[str, str | int] | None = None,
    ) -> None:
        self._tiering = tiering
        self._disk_locality = base.Locality.REMOTE if shared_disk else base.Locality.LOCAL
        self._sample = sample
        self._release = release
        self._facts = dict(facts or {})
        self._last = Sample()

    # Questions

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        allowed = req_context.load_tier_filter
        if not allowed.allows(base.Medium.CPU, None):
            return base.LookupResult.MISS
        disk = allowed.allows(base.Medium.STORAGE, self._disk_locality)
        return _ANSWERS[self._tiering.look_up(key, _wish(req_context), disk)]

    def get_load_source(self, key: OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK if key in _wish(req_context).promoted else CacheHitSource.HOST

    # Transfers

    def prepare_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> SlotsSpec:
        return SlotsSpec(self._tiering.begin_load(keys, _wish(req_context)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        self._tiering.end_load(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        begun = self._tiering.begin_store(keys)
        if begun is None:
            return None
        stored, slots = begun
        # Evicted keys are reported as events; the connector does not read this field.
        return base.PrepareStoreOutput(stored, SlotsSpec(slots), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: base.ReqContext, success: bool = True) -> None:
        self._tiering.end_store(keys, success)

    # Requests and steps

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        req_context.set_state(PromotionRequest())
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        self._tiering.forget(_wish(req_context))

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        self._tiering.end_step()

    def has_pending_work(self) -> bool:
        return self._tiering.busy

    def reset_cache(self) -> None:
        self._tiering.reset(hold=TELLS_FLUSHES)

    def on_reset_flushed(self) -> None:
        self._tiering.end_hold()

    def shutdown(self) -> None:
        self._tiering.close()
        self._release()

    # What is reported

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        for change in self._tiering.take_changes():
            if change.medium is Medium.CPU:
                yield base.OffloadingEvent(change.keys, base.Medium.CPU, change.removed)
            else:
                yield base.OffloadingEvent(
                    change.keys, base.Medium.STORAGE, change.removed, self._disk_locality, DISK_OWNER
                )
        missed = self._tiering.take_missed()
        if TAKES_METADATA_ONLY and missed:
            yield base.OffloadingEvent(missed, base.Medium.CPU, True, metadata_only=True)

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        return [self._facts]

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        sample = self._sample()
        for name in GAUGES:
            stats.set_gauge(name, sample.gauges.get(name, 0.0))
        for name in COUNTERS:
            grown = sample.counters.get(name, 0) - self._last.counters.get(name, 0)
            if grown:
                stats.increase_counter(name, grown)
        self._last = sample
        return stats


def _wish(req_context: base.ReqContext) -> PromotionRequest:
    found: PromotionRequest | None = req_context.get_state(PromotionRequest)
    if found is None:
        found = PromotionRequest()
        req_context.set_state(found)
    return found
