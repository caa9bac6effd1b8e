# SPDX-License-Identifier: Apache-2.0
"""Times in the forms in which logs write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# Fields of a log line that may contain its time, in the order in which they are tried.
TIME_FIELDS = ("timestamp", "time", "created_at", "created")
# From each limit on, a number is in the unit of the limit's name; seconds would reach the first limit in the year 5138.
MILLISECONDS_FROM = 1e11
MICROSECONDS_FROM = 1e14
NANOSECONDS_FROM = 1e17
NUMBERS_MAX = 1e20


def time_in(*places: Mapping[str, Any]) -> Any:
    """Return the time of the first mapping that has one, as it is written; None if none has."""
    return next((place[name] for place in places for name in TIME_FIELDS if place.get(name) is not None), None)


def seconds_of(value: Any) -> float:
    """Return a time as seconds since 1970. Raises ValueError if the value is not a time.

    The value is a number (of seconds, milliseconds, microseconds or nanoseconds) or an ISO 8601 text, which is in UTC
    if it names no zone.
    """
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= NUMBERS_MAX:
        raise ValueError("not a time")
    for least, unit in ((NANOSECONDS_FROM, 1e9), (MICROSECONDS_FROM, 1e6), (MILLISECONDS_FROM, 1e3)):
        if value >= least:
            return value / unit
    return float(value)
