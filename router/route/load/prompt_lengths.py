# SPDX-License-Identifier: Apache-2.0
"""How long the prompts are that each worker computed, in powers of two. Pure.

It costs a choice nothing: a prompt counts at its first token, or at the end of an answer that says how long it is.
Prompts of which only the choice is known do not count.
"""

from __future__ import annotations

from collections.abc import Collection

from kvrouter.router.base.common.ids import WorkerKey

# Powers of two; the last one takes all that is longer.
CLASSES = 32


class PromptLengths:
    """Since each worker's engine, or this process, started."""

    def __init__(self) -> None:
        self._counts: dict[WorkerKey, list[int]] = {}

    def add(self, worker: WorkerKey, num_tokens: int) -> None:
        counts = self._counts.get(worker)
        if counts is None:
            counts = self._counts[worker] = [0] * CLASSES
        counts[min(num_tokens.bit_length(), CLASSES - 1)] += 1

    def total(self, worker: WorkerKey) -> int:
        """Prompts of any length."""
        return sum(self._counts.get(worker, ()))

    def below(self, worker: WorkerKey, tokens: int) -> int:
        """Prompts that are shorter than `tokens` for certain: rounded down to a power of two."""
        return sum(self._counts.get(worker, ())[: tokens.bit_length()])

    def above(self, worker: WorkerKey, tokens: int) -> int:
        """Prompts that are longer than `tokens` for certain: rounded up to a power of two."""
        return sum(self._counts.get(worker, ())[tokens.bit_length() + 1 :])

    def forget(self, worker: WorkerKey) -> None:
        """Count from zero again, because another process of the engine has computed no prompts."""
        self._counts.pop(worker, None)

    def keep(self, workers: Collection[WorkerKey]) -> None:
        """Forget all others."""
        for worker in self._counts.keys() - set(workers):
            del self._counts[worker]
