# SPDX-License-Identifier: Apache-2.0
"""The names of a worker and of a place in which it holds blocks.

Pure values. Their text forms are used in Redis keys, in `/workers` and in logs; `index/store/keys.py` quotes them in
keys, so that hostile names do no harm there.
"""

from __future__ import annotations

from typing import NamedTuple

GPU = "GPU"
CPU = "CPU"
STORAGE = "STORAGE"


def route_name(worker_id: str, dp_rank: int) -> str:
    """Return the worker's name in routes: `w0`, or `w0@3` for a rank other than 0."""
    return worker_id if dp_rank == 0 else f"{worker_id}@{dp_rank}"


class WorkerKey(NamedTuple):
    """The key of one engine core: one replica of a model and one data-parallel rank of it."""

    model: str
    worker_id: str
    dp_rank: int = 0

    @property
    def route_name(self) -> str:
        """The worker's name in routes: `w0`, or `w0@3` for a rank other than 0."""
        return route_name(self.worker_id, self.dp_rank)


class Place(NamedTuple):
    """A place in which a worker holds a block: a KV cache group, a medium and, for a secondary tier, an owner.

    `group_idx` is None for the one unnamed group of an engine that names none; it never mixes with group 0.
    """

    group_idx: int | None
    medium: str
    ownership: str | None = None

    @property
    def text(self) -> str:
        """The text form: `g0:GPU`, `g-:GPU` for the unnamed group, `g1:STORAGE:owner` with an owner."""
        group = "-" if self.group_idx is None else str(self.group_idx)
        base = f"g{group}:{self.medium}"
        return base if self.ownership is None else f"{base}:{self.ownership}"
