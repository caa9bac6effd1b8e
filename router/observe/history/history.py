# SPDX-License-Identifier: Apache-2.0
"""The traffic of every model: of the last hour in steps of 5 s, and of the last day in steps of a minute. Pure.

Counts are added to both kinds of steps, so minutes are never computed from steps of 5 s. A step begins at a multiple of
its length, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvrouter.contract.history import HistoryReply, HistorySeries, HistoryTotals
from kvrouter.router.observe.history.history_entry import MAX_MODELS, OTHER, SUM_NAMES, ModelStep, fits, in_order
from kvrouter.router.observe.history.history_ring import StepRing, StepSums, percentiles

FINE_STEP_S, MINUTE_S = 5, 60
# The longest range in each kind of steps.
RANGE_S = {FINE_STEP_S: 3_600, MINUTE_S: 86_400}
# How far an entry may be ahead of this process's time, because clocks differ or the process stalled. An entry that is
# further ahead has a wrong time.
AHEAD_S = 60
# How long after its end a step is shown: by then all processes have written their counts, and this one has read them.
SETTLE_S = 3.0
# How many steps of each kind are kept: those of the longest range, those ahead, and those that are not shown yet.
SLOTS = {step_s: range_s // step_s + AHEAD_S // step_s + 3 for step_s, range_s in RANGE_S.items()}

_SAVED = SUM_NAMES.index("saved_us")


class ModelHistory:
    """The steps of one model."""

    __slots__ = ("rings",)

    def __init__(self) -> None:
        self.rings = {step_s: StepRing(slots) for step_s, slots in SLOTS.items()}

    @property
    def bytes(self) -> int:
        """The memory of the steps."""
        return sum(ring.bytes for ring in self.rings.values())

    def newest_s(self) -> int:
        """Return when the newest step with traffic began."""
        return max(ring.newest * step_s for step_s, ring in self.rings.items())


class History:
    """The steps of all models, at most MAX_MODELS and OTHER."""

    def __init__(self) -> None:
        self._models: dict[str, ModelHistory] = {}

    @property
    def bytes(self) -> int:
        """The memory of all steps."""
        return sum(model.bytes for model in self._models.values())

    def name(self, model: str, now_s: float) -> str:
        """Return the name under which a model is counted: its own, or OTHER for those beyond the limit."""
        if model in self._models or model == OTHER:
            return model
        if not fits(model):
            return OTHER
        if len(self._models) - (OTHER in self._models) >= MAX_MODELS:
            self._forget_idle(now_s)
            if len(self._models) - (OTHER in self._models) >= MAX_MODELS:
                return OTHER
        return model

    def _forget_idle(self, now_s: float) -> None:
        """Drop the models that have had no traffic within the longest range."""
        oldest_s = now_s - max(RANGE_S.values())
        for model in [model for model, steps in self._models.items() if steps.newest_s() < oldest_s]:
            del self._models[model]

    def add(self, step_s: int, start_s: int, sums: ModelStep, now_s: float) -> bool:
        """Add the sums of one model to a step, and return False if the step's time is out of range.

        Args:
            step_s: The length of the step.
            start_s: When it began.
            sums: The sums.
            now_s: The present time.
        """
        if start_s % step_s or not now_s - RANGE_S[step_s] - 2 * step_s <= start_s <= now_s + AHEAD_S:
            return False
        name = self.name(sums.model, now_s)
        history = self._models.get(name)
        if history is None:
            history = self._models[name] = ModelHistory()
        history.rings[step_s].add(start_s // step_s, sums)
        return True

    def reply(self, range_s: int, model: str | None, now_s: float) -> HistoryReply:
        """Return the steps of a range that ends now, of one model or of all.

        Args:
            range_s: The length of the range; it decides the length of the steps.
            model: The model; None for the sums of all.
            now_s: The present time.
        """
        step_s = FINE_STEP_S if range_s <= RANGE_S[FINE_STEP_S] else MINUTE_S
        count = range_s // step_s
        first = int((now_s - SETTLE_S) // step_s) - count
        steps = self._steps(step_s, first, count, model)
        columns = {name: steps.sums[:, index].tolist() for index, name in enumerate(SUM_NAMES)}
        del columns["saved_us"]
        minute = MINUTE_S // step_s
        return HistoryReply(
            range_s,
            step_s,
            sorted(self._models, key=in_order),
            [number * step_s for number in range(first, first + count)],
            HistorySeries(
                **columns,
                saved_s=(steps.sums[:, _SAVED] / 1e6).tolist(),
                ttft_p50_s=percentiles(steps.ttft, 0.5),
                ttft_p95_s=percentiles(steps.ttft, 0.95),
            ),
            _totals(steps),
            _totals(StepSums(steps.sums[-minute:], steps.ttft[-minute:])),
        )

    def _steps(self, step_s: int, first: int, count: int, model: str | None) -> StepSums:
        """Return the steps of one model, or the sums of all."""
        shown: Mapping[str, ModelHistory] = self._models
        if model is not None:
            shown = {model: self._models[model]} if model in self._models else {}
        total = StepSums.zeros(count)
        for history in shown.values():
            history.rings[step_s].add_to(total, first)
        return total


def _totals(steps: StepSums) -> HistoryTotals:
    """Return the sums of all steps, with the percentiles of all their answers."""
    totals = dict(zip(SUM_NAMES, steps.sums.sum(axis=0).tolist(), strict=True))
    saved_us = totals.pop("saved_us")
    ttft = steps.ttft.sum(axis=0, dtype=np.int64)[None, :]
    return HistoryTotals(
        **totals,
        saved_s=saved_us / 1e6,
        ttft_p50_s=percentiles(ttft, 0.5)[0],
        ttft_p95_s=percentiles(ttft, 0.95)[0],
    )
