# SPDX-License-Identifier: Apache-2.0
"""The slots of a transfer, as vLLM's connector passes them from the scheduler to the workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_offload.base import LoadStoreSpec


class SlotsSpec(LoadStoreSpec):  # type: ignore[misc]
    """Slots of the CPU memory, one for each chunk, in the order of the chunks."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = np.array(slots, dtype=np.int64)

    def __repr__(self) -> str:
        return f"SlotsSpec({self.slots.tolist()})"
