# SPDX-License-Identifier: Apache-2.0
"""What a run asks of whoever routes, and what it says of each request's progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.engines.engine_metrics import EngineLoad

# What each engine would say of itself now, in the order of the workers.
EngineLoads: TypeAlias = Callable[[], Sequence[EngineLoad]]


class Arrival(NamedTuple):
    """A request that is to be placed. pieces: ids of what it says; hashes: of its full blocks, as the index has them;
    max_tokens: what its client asks for at most; session, key: see Request."""

    pieces: NDArray[np.uint64]
    hashes: NDArray[np.uint64]
    num_tokens: int
    max_tokens: int
    session: int | None = None
    key: str = ""


class Placed(Protocol):
    """A request's place. number: of its worker; achievable_tokens: the longest hit of any worker when it came;
    predicted_tokens: what the index says that its own reuses. Both by vLLM's hit rule over every group and tier,
    whatever the policy itself looks at. expected_tokens: the same with what is computed before it gets its turn; a router
    that expects nothing says what is predicted. reused: what the replica reused in fact."""

    @property
    def number(self) -> int: ...

    @property
    def achievable_tokens(self) -> int: ...

    @property
    def predicted_tokens(self) -> int: ...

    @property
    def expected_tokens(self) -> int: ...

    def reused(self, tokens: int) -> None: ...

    def first_token(self) -> None: ...

    def done(self, output_tokens: int | None) -> None:
        """End it. output_tokens: None where its worker refused or lost it."""
        ...


class Router(Protocol):
    def place(self, arrival: Arrival, pinned: int | None = None) -> Placed:
        """Place a request at the worker of the policy's choice, or at `pinned`."""
        ...

    def tend(self, loads: EngineLoads) -> None:
        """Before each arrival, at its time: what a router does now and then."""
        ...
