# SPDX-License-Identifier: Apache-2.0
"""One replay request: what it requests, why, and the progress of its answer. State only; `batch_cursor.py` decides."""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class Purpose(Enum):
    """Why a replay is requested."""

    # Nothing is known: take the ring from wherever it begins.
    START = auto()
    # Something is known: is this still the same life, and what was missed?
    PROVE = auto()
    # A live seq was higher than expected.
    FILL = auto()


class Request(msgspec.Struct):
    """One replay request. A new number means a new request; its answer must not mix with an older one's."""

    number: int
    # The first requested seq.
    start: int
    purpose: Purpose
    # A check without a known fault: live batches are not held for it.
    silent: bool = False
    # Requested again from where an answer had a hole: ZMQ's ROUTER drops silently above its high-water mark.
    again_at: int | None = None
    # The answer's first batch has been compared with the last one handed out, or there was none.
    judged: bool = False
    # Its answer was counted by `ReplayDebt`.
    paid: bool = False
    # New batches in the answer.
    batches: int = 0
    # The same, since it was last requested again.
    progress: int = 0
