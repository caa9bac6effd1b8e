# SPDX-License-Identifier: Apache-2.0
"""The interface between a run and a router: where a request goes, and the request's progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.engines.engine_metrics import EngineLoad

# Returns each engine's current gauges, in the order of the workers.
EngineLoads: TypeAlias = Callable[[], Sequence[EngineLoad]]


class Arrival(NamedTuple):
    """A request that is to be placed."""

    # Ids of the prompt's pieces.
    pieces: NDArray[np.uint64]
    # Hashes of the prompt's full blocks, as the index has them.
    hashes: NDArray[np.uint64]
    num_tokens: int
    # The client's limit for the answer.
    max_tokens: int
    # See `Request`.
    session: int | None = None
    key: str = ""


class PlacedPull(NamedTuple):
    """The blocks that a worker is to fetch from another one."""

    # Index of the source.
    source: int
    # The tokens that the worker reuses if all blocks arrive, and those among them that are fetched.
    tokens: int
    fetched_tokens: int
    timeout_s: float
    # The worker's own hit on the GPU, to which the rest is loaded.
    on_gpu: int


class Placed(NamedTuple):
    """A placed request, and the functions that report its progress.

    Hits follow vLLM's hit rule over every group and tier, whatever the policy itself looks at.
    """

    # Index of the worker.
    number: int
    # Longest hit of any worker when the request came.
    achievable_tokens: int
    # Hit of the request's own worker, by the index.
    predicted_tokens: int
    # Predicted tokens and those that other requests will have computed before this one gets its turn. A router that
    # expects nothing has the predicted tokens.
    expected_tokens: int
    # Takes the tokens that the replica really reused.
    reused: Callable[[int], None]
    first_token: Callable[[], None]
    # Ends the request. It takes the tokens of the answer, or None if the worker refused or lost the request.
    done: Callable[[int | None], None]
    # None if the worker fetches nothing.
    pull: PlacedPull | None = None


class Router(Protocol):
    """The interface of a router in virtual time."""

    def place(self, arrival: Arrival, pinned: int | None = None) -> Placed:
        """Place a request at the worker of the policy's choice, or at `pinned`."""
        ...

    def tend(self, loads: EngineLoads) -> None:
        """Do the router's periodic work. Called before each arrival, at its time."""
        ...
