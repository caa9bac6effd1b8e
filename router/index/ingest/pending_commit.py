# SPDX-License-Identifier: Apache-2.0
"""What one worker's stream changed, on its way to the mirror and to the store."""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.net_changes import ResidencyDelta


class PendingCommit(msgspec.Struct, frozen=True):
    """One commit's worth of changes.

    opens_epoch: everything earlier of this worker is void. seqs: first and last batch, None when there was none."""

    epoch: str
    opens_epoch: bool
    seqs: tuple[int, int] | None
    changes: list[ResidencyDelta]
    copies: list[tuple[Place, int, int]]
    meta: dict[str, bytes]
