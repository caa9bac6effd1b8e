# SPDX-License-Identifier: Apache-2.0
"""A question to the index and its answer, as every layer from the API to the matcher sees them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.names import WorkerKey


class Question(msgspec.Struct, frozen=True):
    """How many tokens of this prompt would each worker of `model` reuse?

    Exactly one of `token_ids` (int64, from the first on) and `block_hashes` (uint64, at the hash block size, from block 0) is
    given. num_tokens is the prompt's length, also when only its hashes or its first tokens are known.
    """

    model: str
    num_tokens: int
    token_ids: NDArray[np.int64] | None = None
    block_hashes: NDArray[np.uint64] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    worker_ids: frozenset[str] | None = None
    exclude_worker_ids: frozenset[str] = frozenset()
    # Only this data-parallel rank of each worker.
    dp_rank: int | None = None
    explain: bool = False


class GroupCover(msgspec.Struct, frozen=True):
    """How far one KV cache group alone would let the GPU hit reach, in tokens."""

    group_idx: int | None
    kind: str
    covered: int


class Limit(msgspec.Struct, frozen=True):
    """The group that kept the deepest hit from being longer, and a sentence why."""

    group_idx: int | None
    kind: str
    why: str


class Hit(msgspec.Struct, frozen=True):
    """Tokens of the prompt that one worker would not compute again; cumulative, so gpu <= cpu <= disk.

    `reason` says why credit is withheld or reduced, and is empty when nothing is. approximate: a guess from what was sent there.
    """

    worker: WorkerKey
    gpu: int
    cpu: int
    disk: int
    state: str
    reason: str = ""
    groups: tuple[GroupCover, ...] = ()
    limited_by: Limit | None = None
    approximate: bool = False
