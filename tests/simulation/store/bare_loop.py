# SPDX-License-Identifier: Apache-2.0
"""An event loop on a virtual clock, without a selector, for tests of the store alone.

Time jumps to the next timer when nothing else is ready. A loop that waits for nothing at all fails in place of hanging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Connect = Callable[..., Any]


class _Jumps:
    """A selector for the loop: it reports no events, and moves the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise RuntimeError("the simulation waits for nothing: no timer is set and no callback is ready")
        self.now_s += max(0.0, timeout_s)
        return []


class BareLoop(asyncio.BaseEventLoop):
    """The loop; `connect` takes the place of `create_connection`."""

    def __init__(self, connect: Connect | None = None) -> None:
        super().__init__()
        self._selector = _Jumps()
        self.connect = connect

    def time(self) -> float:
        return self._selector.now_s

    async def create_connection(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        assert self.connect is not None
        return await self.connect(*args, **options)

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing: no thread sleeps in a selector."""
