# SPDX-License-Identifier: Apache-2.0
"""What rounds of requests gave: times, CPU, and from CPU what a router can do. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

# Those of the machine that the goals are for.
CORES = 2


class Samples:
    """By kind and the server's name, of each round: times of single requests, and CPU a request; all in us."""

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, list[NDArray[np.float64]]]] = {}
        self.cpu: dict[str, dict[str, list[float]]] = {}

    def add(self, kind: str, server: str, taken: NDArray[np.float64], cpu_s: float) -> None:
        self.taken.setdefault(kind, {}).setdefault(server, []).append(taken)
        self.cpu.setdefault(kind, {}).setdefault(server, []).append(cpu_s / len(taken) * 1e6)


def capacity(requests: int, used_s: Mapping[int, float]) -> float:
    """Requests a second that a router's processes would reach on CORES if nothing else ran. used_s: CPU of each process
    for `requests` of them."""
    return requests / max(*used_s.values(), sum(used_s.values()) / CORES)
