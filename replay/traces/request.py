# SPDX-License-Identifier: Apache-2.0
"""A trace in memory, the same from every format: the requests' times, lengths and shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import SettingError


class TraceError(SettingError):
    """A trace that cannot be replayed. The message is one line: file, line number, problem and remedy."""


@dataclass(slots=True)
class Request:
    """One request."""

    # Seconds after the trace's first request.
    time_s: float
    prompt_tokens: int
    output_tokens: int
    # (n,) ids below 2**52, one for each piece of the prompt; the last piece is usually not full. Equal ids at equal
    # places mean equal prompts up to the piece's end.
    pieces: NDArray[np.uint64]
    # The id of the request's conversation or user; None if the trace names none.
    session: int | None = None
    # The API key that the request comes with; empty if the trace names none.
    key: str = ""


@dataclass(slots=True)
class Trace:
    """Requests in the order in which they come."""

    name: str
    format: str
    # Tokens of a prompt that one id stands for.
    piece_tokens: int
    requests: list[Request]
    # A sentence for each part of the trace that is estimated or left out.
    notes: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last one."""
        return self.requests[-1].time_s if self.requests else 0.0
