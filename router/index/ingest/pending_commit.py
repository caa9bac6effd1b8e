# SPDX-License-Identifier: Apache-2.0
"""The changes of one worker's stream on their way to the mirror and to the store."""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.net_changes import ResidencyDelta


class PendingCommit(msgspec.Struct, frozen=True):
    """The changes of one commit."""

    epoch: str
    # Whether everything earlier of this worker is void.
    opens_epoch: bool
    # The first and the last batch, None if there was none.
    seqs: tuple[int, int] | None
    changes: list[ResidencyDelta]
    # (place, block hash, number of copies): 2 or more is stored, fewer deletes the number.
    copies: list[tuple[Place, int, int]]
    # The fields of the worker's `meta` to set.
    meta: dict[str, bytes]
