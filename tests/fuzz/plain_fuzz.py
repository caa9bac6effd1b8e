# SPDX-License-Identifier: Apache-2.0
"""A fuzzer without coverage guidance: it runs the fuzz targets with the project's own mutations, without atheris.

python -m tests.fuzz.plain_fuzz INPUTS SEED
"""

from __future__ import annotations

import importlib
import random
import signal
import sys
from typing import Any

from tests.fuzz.script import mutated

# Share of the inputs by target: a payload goes through one decoder, a story also through all stages after it.
SHARES = {"payload_target": 0.90, "stock_target": 0.03, "report_target": 0.07}
# Number of mutated inputs that are mutated again, so that mutations add up.
POOL = 400
# One input takes milliseconds at worst, and tens of milliseconds under the sanitizers.
HANG_S = 20


class Watchdog:
    """A timer that ends the run on an input that takes far too long, and names the input."""

    def __init__(self) -> None:
        self.data = b""

    def __enter__(self) -> Watchdog:
        self._before = signal.signal(signal.SIGALRM, self._stop)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def watch(self, data: bytes) -> None:
        self.data = data
        signal.setitimer(signal.ITIMER_REAL, HANG_S)

    def _stop(self, *_: Any) -> None:
        raise AssertionError(f"hangs on {self.data.hex()}")


def fuzz(name: str, inputs: int, seed: int) -> None:
    """Run a target with its corpus and with mutated inputs; raises AssertionError if it fails or hangs on one."""
    target = importlib.import_module(f"tests.fuzz.{name}")
    corpus = target.corpus()
    rng = random.Random(seed)
    pool = list(corpus)
    with Watchdog() as watchdog:
        for data in corpus:
            watchdog.watch(data)
            target.run(data)
        for _ in range(inputs):
            data = mutated(rng.choice(pool), rng, corpus)
            watchdog.watch(data)
            try:
                target.run(data)
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}: {error!r} on the input {data.hex()}") from error
            if len(pool) < POOL:
                pool.append(data)
            elif rng.random() < 0.1:
                pool[rng.randrange(len(corpus), POOL)] = data


if __name__ == "__main__":
    for target_name, share in SHARES.items():
        count = int(int(sys.argv[1]) * share)
        fuzz(target_name, count, int(sys.argv[2]))
        print(f"{target_name}: {count:,} inputs, none failed", flush=True)
