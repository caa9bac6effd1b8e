# SPDX-License-Identifier: Apache-2.0
"""The traffic of the last day in steps, and the savings of each day: the answers of `/history` and `/savings`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta


class Range(StrEnum):
    """The ranges of `/history`."""

    QUARTER = "15m"
    HOUR = "1h"
    DAY = "24h"


RANGES_S = {Range.QUARTER: 900, Range.HOUR: 3_600, Range.DAY: 86_400}
# The number of days for which savings are kept, today included.
MAX_DAYS = 35
# The description of each sum, which holds for one step and for the whole range.
REQUESTS = "requests that ended: proxied ones, and choices whose end a client reported"
FAILED = "those of them that failed: a status of 500 or more, or an answer that broke off; not clients that hung up"
PROMPT_TOKENS = "tokens of the prompts that were answered"
DELIVERED_TOKENS = "prompt tokens that engines report as reused, over the answers for which there is also a prediction"
PREDICTED_TOKENS = "tokens that were predicted to be reused, for the same answers"
POSSIBLE_TOKENS = "tokens that the worker with the longest hit would have reused, over all choices"
CHOSEN_TOKENS = "tokens that the chosen worker was predicted to reuse, over the same choices"
SAVED_S = (
    "seconds of prefill that reuse saved, at measured speeds: the worker's, else its model's, else the fleet's; "
    "reused tokens are counted only once a speed is known"
)
TTFT_P50_S = "median of the seconds to the first event of streamed answers; null if no answer was streamed"
TTFT_P95_S = "seconds within which 95 of 100 streamed answers sent their first event; null if no answer was streamed"


class HistorySeries(msgspec.Struct, frozen=True):
    """The sums of each step: a list for each sum, with one value per step."""

    requests: Annotated[list[int], Meta(description=REQUESTS)]
    failed: Annotated[list[int], Meta(description=FAILED)]
    prompt_tokens: Annotated[list[int], Meta(description=PROMPT_TOKENS)]
    delivered_tokens: Annotated[list[int], Meta(description=DELIVERED_TOKENS)]
    predicted_tokens: Annotated[list[int], Meta(description=PREDICTED_TOKENS)]
    possible_tokens: Annotated[list[int], Meta(description=POSSIBLE_TOKENS)]
    chosen_tokens: Annotated[list[int], Meta(description=CHOSEN_TOKENS)]
    saved_s: Annotated[list[float], Meta(description=SAVED_S)]
    ttft_p50_s: Annotated[list[float | None], Meta(description=TTFT_P50_S)]
    ttft_p95_s: Annotated[list[float | None], Meta(description=TTFT_P95_S)]


class HistoryTotals(msgspec.Struct, frozen=True):
    """The sums of `HistorySeries`, each over several steps."""

    requests: Annotated[int, Meta(description=REQUESTS)]
    failed: Annotated[int, Meta(description=FAILED)]
    prompt_tokens: Annotated[int, Meta(description=PROMPT_TOKENS)]
    delivered_tokens: Annotated[int, Meta(description=DELIVERED_TOKENS)]
    predicted_tokens: Annotated[int, Meta(description=PREDICTED_TOKENS)]
    possible_tokens: Annotated[int, Meta(description=POSSIBLE_TOKENS)]
    chosen_tokens: Annotated[int, Meta(description=CHOSEN_TOKENS)]
    saved_s: Annotated[float, Meta(description=SAVED_S)]
    ttft_p50_s: Annotated[float | None, Meta(description=TTFT_P50_S)]
    ttft_p95_s: Annotated[float | None, Meta(description=TTFT_P95_S)]


class HistoryReply(msgspec.Struct, frozen=True):
    """The traffic of all routers on the store in a range that ends now, in steps."""

    range_s: Annotated[int, Meta(description="seconds of the range")]
    step_s: Annotated[int, Meta(description="seconds of a step")]
    models: Annotated[
        list[str],
        Meta(description="models with traffic in the last day, at most 16, and `other` for all others"),
    ]
    time_s: Annotated[
        list[int],
        Meta(description="when each step began, in seconds since 1970, the oldest first; the last one has just ended"),
    ]
    series: Annotated[HistorySeries, Meta(description="the sums of each step")]
    totals: Annotated[HistoryTotals, Meta(description="the sums of the range")]
    last_minute: Annotated[HistoryTotals, Meta(description="the same sums over the last minute of the range")]


class SavedDay(msgspec.Struct, frozen=True):
    """The savings of one model on one day."""

    day: Annotated[str, Meta(description="the day in UTC, like 2026-11-27")]
    model: Annotated[str, Meta(description="the model's name; `other` for those beyond the first 16")]
    requests: Annotated[int, Meta(description=REQUESTS)]
    prompt_tokens: Annotated[int, Meta(description=PROMPT_TOKENS)]
    reused_tokens: Annotated[
        int, Meta(description="prompt tokens that were not computed: as engines report, else as predicted")
    ]
    round_robin_tokens: Annotated[
        int,
        Meta(
            description="an estimate of the tokens that would not have been computed if the same prompts had been sent "
            "to the workers in turn"
        ),
    ]
    saved_s: Annotated[float, Meta(description=SAVED_S)]


class SavingsReply(msgspec.Struct, frozen=True):
    """The prompt tokens that were not computed, by day and model, over all routers on the store."""

    days: Annotated[list[SavedDay], Meta(description="the newest day first; days without traffic are absent")]
