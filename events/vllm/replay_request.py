# SPDX-License-Identifier: Apache-2.0
"""One replay request: its range, its purpose, and the progress of its answer. State only; `batch_cursor.py` decides."""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class Purpose(Enum):
    """The reason for a replay request."""

    # No batch is known: take the ring from wherever it begins.
    START = auto()
    # A batch is known: find out whether this is still the same life, and which batches were missed.
    PROVE = auto()
    # A live seq was higher than expected.
    FILL = auto()


class Request(msgspec.Struct):
    """One replay request. A new number means a new request, whose answer must not mix with an older one's."""

    number: int
    # The first requested seq.
    start: int
    purpose: Purpose
    # Whether this is a check without a known fault, for which live batches are not held.
    silent: bool = False
    # The seq at which an answer had a hole, from where it was requested again: ZMQ's ROUTER drops silently above its
    # high-water mark.
    again_at: int | None = None
    # Whether the answer's first batch was compared with the last one handed out, or there was none.
    judged: bool = False
    # Whether `ReplayDebt` has counted the answer.
    paid: bool = False
    # New batches in the whole answer, and since it was last requested again.
    batches: int = 0
    progress: int = 0
