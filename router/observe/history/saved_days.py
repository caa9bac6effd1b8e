# SPDX-License-Identifier: Apache-2.0
"""Sums of the tokens that were not computed, by day and model, in the form in which Redis adds them up. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from kvrouter.contract.history import MAX_DAYS, SavedDay
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.index.store import keys
from kvrouter.router.observe.history.history_entry import MAX_MODELS, OTHER, clamp, in_order
from kvrouter.router.route.load.traffic_sums import ModelSums

# A day's key is kept for one day longer than it is shown, because routers' clocks do not agree on when a day ends.
KEPT_S = (MAX_DAYS + 1) * 86_400
# The sums of a day, in the order in which they are stored. Seconds are in microseconds, so that Redis adds integers.
COLUMNS = ("requests", "prompt_tokens", "reused_tokens", "round_robin_tokens", "saved_us")

Columns: TypeAlias = tuple[int, ...]


def columns_of(sums: ModelSums) -> Columns:
    """Return the sums that count for a day."""
    return (
        sums.requests,
        clamp(sums.prompt_tokens),
        clamp(sums.reused_tokens),
        clamp(sums.round_robin_tokens),
        clamp(sums.saved_s * 1e6),
    )


def day_of(time_s: float) -> str:
    """Return the day of a time in seconds since 1970, in UTC."""
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


def last_days(now_s: float, count: int) -> list[str]:
    """Return today and the days before it, the newest first."""
    today = datetime.fromtimestamp(now_s, UTC).date()
    return [(today - timedelta(days=back)).isoformat() for back in range(count)]


def models_in(fields: Iterable[bytes]) -> set[str]:
    """Return the models that a day's fields name."""
    models = set()
    for field in fields:
        try:
            models.add(keys.parse_savings_field(field)[0])
        except ValueError:
            continue
    return models


def rows_of(day: str, fields: Iterable[tuple[bytes, bytes]]) -> tuple[list[SavedDay], list[StoredValueError]]:
    """Return the rows of a stored day, one per model, and an error for each field that no router writes.

    Args:
        day: The day.
        fields: Its fields and their values.
    """
    sums: dict[str, dict[str, int]] = {}
    damaged = []
    for field, value in fields:
        try:
            model, column = keys.parse_savings_field(field)
            number = keys.parse_number(value)
            if column not in COLUMNS:
                raise ValueError(f"{column} is no sum of a day")
        except ValueError:
            damaged.append(StoredValueError(keys.savings(day), field.decode(errors="replace"), value))
            continue
        if model not in sums and len(sums) - (OTHER in sums) >= MAX_MODELS:
            model = OTHER
        row = sums.setdefault(model, dict.fromkeys(COLUMNS, 0))
        row[column] += number
    rows = []
    for model in sorted(sums, key=in_order):
        row = sums[model]
        saved_s = row.pop("saved_us") / 1e6
        rows.append(SavedDay(day=day, model=model, **row, saved_s=saved_s))
    return rows, damaged
