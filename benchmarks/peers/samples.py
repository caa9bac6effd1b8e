# SPDX-License-Identifier: Apache-2.0
"""The samples of rounds of requests: times, CPU, and the rate that a router could reach by its CPU. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

# The cores of the machine that the goals are for.
CORES = 2


class Samples:
    """Samples of each round by kind of request and the server's name, all in us.

    `taken` has the times of single requests, `cpu` the CPU time for a request.
    """

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, list[NDArray[np.float64]]]] = {}
        self.cpu: dict[str, dict[str, list[float]]] = {}

    def add(self, kind: str, server: str, taken: NDArray[np.float64], cpu_s: float) -> None:
        self.taken.setdefault(kind, {}).setdefault(server, []).append(taken)
        self.cpu.setdefault(kind, {}).setdefault(server, []).append(cpu_s / len(taken) * 1e6)


def capacity(requests: int, used_s: Mapping[int, float]) -> float:
    """Return the requests a second that a router's processes would reach on CORES if nothing else ran.

    Args:
        requests: The number of requests.
        used_s: The CPU time of each process for all these requests.
    """
    return requests / max(*used_s.values(), sum(used_s.values()) / CORES)
