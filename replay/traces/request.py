# SPDX-License-Identifier: Apache-2.0
"""A trace in memory, the same from every format: who came when, how long prompt and answer are, and what the prompt
shares with others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import SettingError


class TraceError(SettingError):
    """A trace that cannot be replayed. One line: the file, the line's number, what is wrong and what to do."""


@dataclass(slots=True)
class Request:
    """One request. time_s: seconds after the trace's first one. pieces: (n,) ids below 2**52, one for each piece of the
    prompt, the last one mostly not full; equal ids at equal places mean equal prompts up to the piece's end. session:
    the id of the conversation or user that it belongs to, None where the trace names none. key: the API key that it
    comes with, empty where the trace names none."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    pieces: NDArray[np.uint64]
    session: int | None = None
    key: str = ""


@dataclass(slots=True)
class Trace:
    """Requests in the order in which they come. piece_tokens: how many tokens of a prompt one id stands for. notes:
    what of the trace is estimated or left out, a sentence each."""

    name: str
    format: str
    piece_tokens: int
    requests: list[Request]
    notes: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def span_s(self) -> float:
        """From the first request to the last one."""
        return self.requests[-1].time_s if self.requests else 0.0
