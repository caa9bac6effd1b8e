# SPDX-License-Identifier: Apache-2.0
"""A signal ends a demo even where Python drops exceptions."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The signal comes while an object is being deleted.
PROGRAM = """
import signal, sys, time
from kvrouter.simulator.demo.signals import StopSignals

class Object:
    def __del__(self):
        signal.raise_signal({number})
        time.sleep(0)

with StopSignals() as signals:
    try:
        made = Object()
        del made
        time.sleep(20)
        sys.exit("the signal was lost")
    except BaseException as error:
        signals.ignore()
        print(type(error).__name__, signals.is_interrupted)
"""


@pytest.mark.parametrize(
    ("number", "shown"), [("signal.SIGINT", "KeyboardInterrupt True\n"), ("signal.SIGTERM", "SystemExit False\n")]
)
def test_a_signal_in_a_callback_ends_the_program_without_a_traceback(number: str, shown: str) -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(number=number)], capture_output=True, text=True, timeout=60, check=False
    )
    assert program.stdout == shown and program.stderr == ""
