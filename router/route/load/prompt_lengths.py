# SPDX-License-Identifier: Apache-2.0
"""Lengths of the prompts that each worker computed, counted in powers of two. Pure.

Counting costs nothing at a choice: a prompt is counted at its first token, or at the end of an answer that reports its
length. A prompt that was only chosen for is not counted.
"""

from __future__ import annotations

from collections.abc import Collection

from kvrouter.router.base.common.ids import WorkerKey

# The last power of two also takes all longer prompts.
CLASSES = 32


class PromptLengths:
    """Counts of prompts by length, since each worker's engine or this process started."""

    def __init__(self) -> None:
        self._counts: dict[WorkerKey, list[int]] = {}

    def add(self, worker: WorkerKey, num_tokens: int) -> None:
        """Count a prompt of this length."""
        counts = self._counts.get(worker)
        if counts is None:
            counts = self._counts[worker] = [0] * CLASSES
        counts[min(num_tokens.bit_length(), CLASSES - 1)] += 1

    def total(self, worker: WorkerKey) -> int:
        """Return the number of prompts of any length."""
        return sum(self._counts.get(worker, ()))

    def below(self, worker: WorkerKey, tokens: int) -> int:
        """Return the number of prompts that are certainly shorter than `tokens`.

        Prompts within the power of two that `tokens` lies in are left out.
        """
        return sum(self._counts.get(worker, ())[: tokens.bit_length()])

    def above(self, worker: WorkerKey, tokens: int) -> int:
        """Return the number of prompts that are certainly longer than `tokens`.

        Prompts within the power of two that `tokens` lies in are left out.
        """
        return sum(self._counts.get(worker, ())[tokens.bit_length() + 1 :])

    def forget(self, worker: WorkerKey) -> None:
        """Reset a worker's counts, because its engine is a new process that has computed no prompts."""
        self._counts.pop(worker, None)

    def keep(self, workers: Collection[WorkerKey]) -> None:
        """Drop the counts of all other workers."""
        for worker in self._counts.keys() - set(workers):
            del self._counts[worker]
