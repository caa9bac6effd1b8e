# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang in the kernel, such as `stat` of a file on a mount whose server is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

# How long reading a file may take before operators have a reason to look. A local file takes microseconds, one on a
# mount over the network milliseconds.
HANG_S = 5.0


class CallHangs(Exception):
    """A call that has not ended in time; it continues in its thread."""


class HangingCall(Generic[T]):
    """A call that is repeated and may hang. It never runs twice at once, so a call that hangs costs one thread.

    The thread is a daemon: unlike with an executor's thread, neither the end of the event loop nor the end of the
    process waits for it.
    """

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        """Store the call without running it.

        Args:
            name: The thread's name.
            call: The function to run. It must not change anything that other threads read.
        """
        self._name = name
        self._call = call
        self._under_way: Future[T] | None = None

    async def result(self, timeout_s: float = HANG_S) -> T:
        """Wait for the run under way, or start one if there is none; return its result or raise its error.

        Raises CallHangs after `timeout_s`; the next `result` waits for the same run.
        """
        run = self._begin()
        waiting = asyncio.wrap_future(run)
        await asyncio.wait({waiting}, timeout=timeout_s)
        if not run.done():
            waiting.cancel()
            raise CallHangs
        self._under_way = None
        return await waiting

    def wait(self, timeout_s: float = HANG_S) -> T:
        """Block the thread until the run ends, like `result` but without an event loop, before the router serves."""
        run = self._begin()
        try:
            run.exception(timeout_s)
        except TimeoutError:
            raise CallHangs from None
        self._under_way = None
        return run.result()

    def _begin(self) -> Future[T]:
        run = self._under_way
        if run is None:
            run = self._under_way = Future()
            # Mark it as running, so that a caller that stops waiting does not cancel it.
            run.set_running_or_notify_cancel()
            threading.Thread(target=self._run, args=(run,), name=self._name, daemon=True).start()
        return run

    def _run(self, run: Future[T]) -> None:
        try:
            run.set_result(self._call())
        except BaseException as error:
            run.set_exception(error)
