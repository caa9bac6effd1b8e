# SPDX-License-Identifier: Apache-2.0
"""The fallback for `batch_scan.pyx`, which reads payloads of plain events in one compiled pass.

The compiled module creates no object per event. Where there was no C compiler, this fallback leaves every batch to the
general decoder, which reads the same from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.events.vllm.messages import BlockRemoved, BlockStored, Event

U64 = NDArray[np.uint64]

Shape: TypeAlias = BlockStored | BlockRemoved
# (the fields that all events share, the hashes of all events, the number of events, the first hash of each event that
# stores blocks without a parent, whether an event has several hashes)
ScannedRun: TypeAlias = tuple[Shape, U64, int, U64, bool]


def scan(
    payloads: list[bytes], shapes: dict[bytes, Shape], read: Callable[[bytes], Event | None]
) -> tuple[int | None, int, list[ScannedRun | Event]] | None:
    """Read the first of consecutive batches, and with it those after it that are plain and name the same rank.

    No batch is joined after one with a single event, which may change what later events teach.

    Returns their rank, how many batches they are, and their runs and single events, in order; None to leave the first
    batch to the general decoder. A run holds events of one kind that differ only in hashes, parent, tokens and fields of
    the request (LoRA, session, salt, extra keys). Between two single events, and between stores and removals, the runs
    are in the order of their first events.

    Args:
        payloads: The batches in their wire form.
        shapes: The shapes that were read before, by the bytes that identify a shape. The scan adds new ones.
        read: Decodes one event; returns None for an event that is not plain.
    """
    return None
