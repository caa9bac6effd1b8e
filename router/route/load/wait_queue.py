# SPDX-License-Identifier: Apache-2.0
"""The order and the limit of prompts that wait because all their possible workers are saturated. Pure.

Prompts of a model are served in the order of arrival. A prompt that may use fewer workers than the others (pinned, or
with workers excluded) does not block them: a few prompts behind it are tried, too. The queue is bounded; expired
prompts leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvrouter.router.base.common.errors import QueueFull

T = TypeVar("T")

# The number of failed attempts after which a look at one model's line ends. Each attempt is a choice, and most prompts
# wait for the same workers.
TRIES_PER_LOOK = 8


class Waiter(Generic[T]):
    """One waiting prompt."""

    __slots__ = ("model", "num_tokens", "what")

    def __init__(self, model: str, num_tokens: int, what: T) -> None:
        self.model = model
        self.num_tokens = num_tokens
        # The caller's own data.
        self.what = what


class WaitQueue(Generic[T]):
    """All waiting prompts, by model, in the order of arrival."""

    def __init__(self, places: int) -> None:
        # How many prompts may wait. If it is lowered, prompts that wait already stay.
        self.places = places
        # Each line is a dict, because it keeps the order and lets a waiter leave from the middle.
        self._lines: dict[str, dict[Waiter[T], None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def waits_for(self, model: str) -> bool:
        """Return whether a prompt waits for the model, so that a new one must queue behind it."""
        return model in self._lines

    def of(self, model: str) -> tuple[int, int]:
        """Return how many prompts wait for a model, and the sum of their tokens."""
        line = self._lines.get(model, {})
        return len(line), sum(waiter.num_tokens for waiter in line)

    def join(self, waiter: Waiter[T], retry_after_s: float) -> None:
        """Add a waiter at the end of its model's line.

        Raises:
            QueueFull: All places are taken; the error carries `retry_after_s`.
        """
        if self._count >= self.places:
            raise QueueFull(
                f"all workers of model {waiter.model!r} are saturated and {self.places} prompts wait already: try again "
                "later, add workers, or raise queue_size",
                retry_after_s=retry_after_s,
            )
        self._lines.setdefault(waiter.model, {})[waiter] = None
        self._count += 1

    def leave(self, waiter: Waiter[T]) -> None:
        """Remove a waiter that is served or waits no longer; repeating it changes nothing."""
        line = self._lines.get(waiter.model, {})
        if waiter in line:
            del line[waiter]
            self._count -= 1
            if not line:
                del self._lines[waiter.model]

    def serve(self, attempt: Callable[[T], bool]) -> int:
        """Try the waiters at the front of each line, and return how many were served.

        Args:
            attempt: Serves the caller's data of a waiter; returns False if there is no room for it yet.
        """
        served = 0
        for model in list(self._lines):
            failed = 0
            for waiter in list(self._lines[model]):
                if attempt(waiter.what):
                    self.leave(waiter)
                    served += 1
                    continue
                failed += 1
                if failed == TRIES_PER_LOOK:
                    break
        return served
