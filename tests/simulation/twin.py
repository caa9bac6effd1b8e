# SPDX-License-Identifier: Apache-2.0
"""A second interpreter with another hash seed, which repeats worlds: the same seed must give the same history there.

As in a search, each world has a process of its own, forked from an interpreter that has run none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tests.simulation.world import Outcome, run_world

# Without randomisation, unlike other interpreters.
HASH_SEED = "0"
# Worlds that may be requested at once.
BACKLOG = 64
# The law that both keep.
DIGEST = "digest"


class Twin:
    """The address of a second interpreter."""

    def __init__(self, path: str) -> None:
        self._path = path

    def compare(self, outcome: Outcome) -> None:
        """Set the problem of a world without one if the second interpreter does not repeat it, with the first difference."""
        with Client(self._path) as connection:
            connection.send(outcome.seed)
            other: Outcome = connection.recv()
        if outcome.problem or outcome.digest == other.digest:
            return
        lines = zip_longest(outcome.history, other.history, fillvalue="the end")
        first, second = next((pair for pair in lines if pair[0] != pair[1]), ("the same history", "random numbers"))
        outcome.problem = f"{DIGEST}: two processes differ first in {first!r} and {second!r}"


@contextmanager
def running() -> Iterator[Twin]:
    """Run a second interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "twin")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.twin", path],
            env=os.environ | {"PYTHONHASHSEED": HASH_SEED},
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None and process.stdout.readline(), "the second interpreter does not start"
            yield Twin(path)
        finally:
            process.terminate()
            process.communicate()


def serve(path: str) -> None:
    """Run the world of each seed that is sent, in a process of its own."""
    # The search ends this process; children that have ended leave nothing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Listener(path, backlog=BACKLOG) as listener:
        print("serves", flush=True)
        while True:
            with listener.accept() as connection:
                if os.fork() == 0:
                    connection.send(run_world(connection.recv()))
                    # The remains of killed routers must not run.
                    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
