# SPDX-License-Identifier: Apache-2.0
"""Distinguishes the successive processes of a worker's engine, for everything that must end with one (ADR 22). Pure.

If this router follows the worker, its own streams and polls show another life. If another router does, the state that
it writes shows it: the start time of the engine's process, or the epoch if the engine gives no start time.
"""

from __future__ import annotations


class EngineLives:
    """A count of lives. Invariant: `number` grows whenever another process may have begun; growth alone proves no
    restart."""

    def __init__(self) -> None:
        self.number = 0
        self._start_s: float | None = None
        self._epoch: str | None = None
        self._voids = 0
        self._is_down = False

    def observe(self, *, start_s: float | None, epoch: str | None, voids: int, is_down: bool) -> None:
        """Take the present signs of a restart.

        Args:
            start_s: When the engine's process started, None if it is unknown.
            epoch: The epoch that another router writes, None while this one follows the worker.
            voids: How often this router's own ingest forgot what it had learned.
            is_down: Whether the engine is gone.
        """
        begun = voids > self._voids or (is_down and not self._is_down)
        if start_s is not None:
            begun = begun or self._start_s not in (None, start_s)
            self._start_s = start_s
        elif epoch is not None:
            begun = begun or self._epoch not in (None, epoch)
        self._epoch = epoch if epoch is not None else self._epoch
        self._voids, self._is_down = voids, is_down
        self.number += begun
