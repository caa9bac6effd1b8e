# SPDX-License-Identifier: Apache-2.0
"""One replay request: what is asked, why, and how far its answer has come. State only; `batch_cursor.py` decides."""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class Purpose(Enum):
    """Why a replay was asked for."""

    # Nothing is known: take the ring from wherever it begins.
    START = auto()
    # Something is known: is this still the same life, and what was missed?
    PROVE = auto()
    # A live seq came too early.
    FILL = auto()


class Request(msgspec.Struct):
    """One replay request. A new number means a new request; its answer must not mix with an older one's."""

    number: int
    # First seq asked for.
    start: int
    purpose: Purpose
    # A check while nothing is known to be wrong: live batches are not held for it.
    silent: bool = False
    # Whether its end is news even when it brings nothing.
    announced: bool = True
    # Asked again from where an answer had a hole: ZMQ's ROUTER drops silently above its high-water mark.
    again_at: int | None = None
    # The answer's first batch has been compared with the last one handed out, or there was none.
    judged: bool = False
    # That it is answered has been counted towards reading all anew.
    paid: bool = False
    # New batches that the answer brought.
    batches: int = 0
    # The same, since it was last asked again.
    progress: int = 0
    first_seq: int | None = None
    last_seq: int | None = None
