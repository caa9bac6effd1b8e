# SPDX-License-Identifier: Apache-2.0
"""Who and where: the names of a worker and of a place in which it holds blocks.

Pure values. Their text forms are used in Redis keys, in `/workers` and in logs; see `index/keys.py` for the quoting
that makes hostile names harmless there.
"""

from __future__ import annotations

from typing import NamedTuple

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"

# The media that earn credit, in the order in which the engine asks them. Others (FS, OBJ, ...) are counted and shown
# only.
TIERS = (GPU, CPU, STORAGE)


def route_name(worker_id: str, dp_rank: int) -> str:
    """`w0`, or `w0@3` for another rank than 0."""
    return worker_id if dp_rank == 0 else f"{worker_id}@{dp_rank}"


class WorkerKey(NamedTuple):
    """One engine core: one replica and one data-parallel rank of it."""

    model: str
    worker_id: str
    dp_rank: int = 0

    @property
    def route_name(self) -> str:
        """See `route_name`."""
        return route_name(self.worker_id, self.dp_rank)


class Place(NamedTuple):
    """Where a worker holds a block: its KV cache group, the medium and, for a secondary tier, the owner.

    group_idx None is the one unnamed group of an engine that names none; it never mixes with group 0.
    """

    group_idx: int | None
    medium: str
    ownership: str | None = None

    @property
    def text(self) -> str:
        """`g0:GPU`, `g-:GPU` for the unnamed group, `g1:STORAGE:owner` with an owner."""
        group = "-" if self.group_idx is None else str(self.group_idx)
        base = f"g{group}:{self.medium}"
        return base if self.ownership is None else f"{base}:{self.ownership}"
