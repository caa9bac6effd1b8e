# SPDX-License-Identifier: Apache-2.0
"""What `batch_scan.pyx` does, compiled: a whole payload of plain events in one pass, without an object an event.

This stands for it where there was no C compiler: it leaves every batch to the general decoder, which reads the same out
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.events.vllm.messages import BlockRemoved, BlockStored, Event

U64 = NDArray[np.uint64]

Shape: TypeAlias = BlockStored | BlockRemoved
# (what the events have in common, hashes of all, how many events, first hash of each that stores without a parent)
ScannedRun: TypeAlias = tuple[Shape, U64, int, U64]


def scan(
    payload: bytes, shapes: dict[bytes, Shape], read: Callable[[bytes], Event | None]
) -> tuple[int | None, list[ScannedRun | Event]] | None:
    """(rank, runs and single events in order) of a batch; None: left to the general decoder.

    A run has events of one kind that differ in hashes, parent, tokens and names of requests alone. Runs between two
    single events, or between stores and removals, stand in the order of their first events.

    shapes: what was read before, by the bytes of what makes a shape. read: decodes one event; None: it is no plain one.
    """
    return None
