# SPDX-License-Identifier: Apache-2.0
"""The successive processes of a worker's engine, for everything that must end with a process (ADR 22). Pure.

If this router follows the worker, its own streams and polls show that another process has begun. If another router
follows it, the state that this other router writes shows it: by the start time of the engine's process, or by the epoch
if the engine gives no start time.
"""

from __future__ import annotations


class EngineLives:
    """A count of an engine's lives, each being one process.

    Invariant: `number` grows whenever another process may have begun. Growth alone proves no restart.
    """

    def __init__(self) -> None:
        self.number = 0
        self._start_s: float | None = None
        self._epoch: str | None = None
        self._voids = 0
        self._is_down = False

    def observe(self, *, start_s: float | None, epoch: str | None, voids: int, is_down: bool) -> None:
        """Compare the present signs of a restart with the previous ones.

        Args:
            start_s: When the engine's process started, None if it is unknown.
            epoch: The epoch that another router writes, None while this one follows the worker.
            voids: How often this router's own ingest has forgotten what it had learned of an engine.
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
