# SPDX-License-Identifier: Apache-2.0
"""Live batches that are held while a replay runs. Pure."""

from __future__ import annotations

from kvrouter.events.transport.held_queue import HeldQueue
from kvrouter.events.vllm.stream_items import Batch

# Twice vLLM's default ring (buffer_steps 10,000), for the batches that arrive while a whole ring is replayed.
DEFAULT_MAX_HELD = 20_000


class HeldBatches(HeldQueue[Batch]):
    """A queue of batches in the order of their arrival. The first `old` of them cannot be relied upon."""

    # How many batches arrived over a lost connection, or before a whole replay was requested.
    old = 0
    # Whether batches were dropped; the cursor clears it.
    overflowed = False

    def hold(self, batch: Batch) -> None:
        """Hold the next batch."""
        if self.append(batch.seq, batch, len(batch.payload)):
            self.overflowed = True

    def hold_first(self, batch: Batch, *, old: bool) -> None:
        """Hold a batch ahead of the others."""
        self.append_first(batch.seq, batch, len(batch.payload))
        self.old += old

    def pop(self) -> tuple[int, Batch, int]:
        """Remove and return the first batch."""
        self.old = max(0, self.old - 1)
        return super().pop()

    def mark_old(self) -> None:
        """Mark all held batches as old."""
        self.old = len(self)

    def drop_old(self) -> None:
        """Drop the old batches."""
        while self.old:
            self.pop()

    def first(self) -> Batch | None:
        """Return the first batch without removing it, or None."""
        return next((batch for _, batch, _ in self), None)
