# SPDX-License-Identifier: Apache-2.0
"""The signals that end a program which waits in many places: Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any, NoReturn

# The exit codes that shells expect of a program ended by SIGINT and SIGTERM.
INTERRUPTED, TERMINATED = 130, 143
# A callback of the interpreter ends within microseconds, and a person does not notice a delay of this length.
RETRY_S = 0.02


class StopSignals:
    """The signals of one run, from `with` on: SIGTERM unwinds the program as Ctrl-C does.

    The program ends even if the signal comes in a weakref's callback or in `__del__`, where Python prints and drops
    every exception: a dropped one is raised again shortly afterwards. Outside the main thread, signals are left alone.
    """

    def __init__(self) -> None:
        self.is_interrupted = False
        self._error: BaseException = KeyboardInterrupt()
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number, handler in (
                (signal.SIGINT, self._interrupt),
                (signal.SIGTERM, self._terminate),
                (signal.SIGALRM, self._raise),
            ):
                self._before[number] = signal.signal(number, handler)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook

    def ignore(self) -> None:
        """Ignore further signals, because the clean-up begins."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, *_: object) -> NoReturn:
        self.is_interrupted = True
        self._error = KeyboardInterrupt()
        raise self._error

    def _terminate(self, *_: object) -> NoReturn:
        self._error = SystemExit(TERMINATED)
        raise self._error

    def _raise(self, *_: object) -> NoReturn:
        raise self._error

    def _dropped(self, dropped: Any) -> None:
        """Replace Python's hook for exceptions that nothing can catch."""
        if dropped.exc_value is self._error:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        else:
            self._hook(dropped)
