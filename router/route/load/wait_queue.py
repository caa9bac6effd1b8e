# SPDX-License-Identifier: Apache-2.0
"""The queue of prompts whose possible workers are all saturated: order and limit. Pure.

First come, first served within a model. A prompt that waits for fewer workers than the others (pinned, or some
excluded) does not block them: a few behind it are tried, too. Bounded; expired prompts leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvrouter.router.base.common.errors import QueueFull

T = TypeVar("T")

# Tries that may fail before a look at one model's line ends: each is a choice, and most wait for the same workers.
TRIES_PER_LOOK = 8


class Waiter(Generic[T]):
    """One in line. `what` is the caller's."""

    __slots__ = ("model", "num_tokens", "what")

    def __init__(self, model: str, num_tokens: int, what: T) -> None:
        self.model = model
        self.num_tokens = num_tokens
        self.what = what


class WaitQueue(Generic[T]):
    """All who wait, by model, in their order."""

    def __init__(self, places: int) -> None:
        self._places = places
        # A dict for its order and for leaving in between.
        self._lines: dict[str, dict[Waiter[T], None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def waits_for(self, model: str) -> bool:
        """Whether a prompt waits for the model, so that a new one must queue behind it."""
        return model in self._lines

    def of(self, model: str) -> tuple[int, int]:
        """How many wait for a model, and the tokens of their prompts."""
        line = self._lines.get(model, {})
        return len(line), sum(waiter.num_tokens for waiter in line)

    def join(self, waiter: Waiter[T], retry_after_s: float) -> None:
        """Raises QueueFull."""
        if self._count >= self._places:
            raise QueueFull(
                f"all workers of model {waiter.model!r} are saturated and {self._places} prompts wait already: try again "
                "later, add workers, or raise queue_size",
                retry_after_s=retry_after_s,
            )
        self._lines.setdefault(waiter.model, {})[waiter] = None
        self._count += 1

    def leave(self, waiter: Waiter[T]) -> None:
        """It is served, or waits no longer. Repeating it changes nothing."""
        line = self._lines.get(waiter.model, {})
        if waiter in line:
            del line[waiter]
            self._count -= 1
            if not line:
                del self._lines[waiter.model]

    def serve(self, attempt: Callable[[T], bool]) -> int:
        """Tries those at the front; who is served leaves. Returns how many were."""
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
