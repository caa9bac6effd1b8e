# SPDX-License-Identifier: Apache-2.0
"""Times as logs write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# Fields of a line that may have its time, the first that is there.
TIME_FIELDS = ("timestamp", "time", "created_at", "created")
# A number above these is in the unit before: seconds reach the first in the year 5138.
MILLISECONDS_FROM = 1e11
MICROSECONDS_FROM = 1e14
NANOSECONDS_FROM = 1e17
NUMBERS_MAX = 1e20


def time_in(*places: Mapping[str, Any]) -> Any:
    """The time of the first place that has one, as it is written; None if none has."""
    return next((where[name] for where in places for name in TIME_FIELDS if where.get(name) is not None), None)


def seconds_of(value: Any) -> float:
    """Seconds since 1970 of a number (seconds, milliseconds, microseconds or nanoseconds) or of ISO 8601, without a zone
    in UTC. Raises ValueError."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= NUMBERS_MAX:
        raise ValueError("not a time")
    for least, unit in ((NANOSECONDS_FROM, 1e9), (MICROSECONDS_FROM, 1e6), (MILLISECONDS_FROM, 1e3)):
        if value >= least:
            return value / unit
    return float(value)
