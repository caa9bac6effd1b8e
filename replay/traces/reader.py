# SPDX-License-Identifier: Apache-2.0
"""What every format's reader is given and gives. A further format is one module with a `Reader`, and its line in
`formats.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.replay.traces.lines import Line
from kvrouter.replay.traces.request import Request

# A chat's or a completion's body as its client wrote it -> its token ids.
# Raises ValueError where a tokenizer alone cannot say.
Tokenize: TypeAlias = Callable[[str, dict[str, Any]], NDArray[np.int64]]

# What text of English and code comes to with tokenizers of 100,000 tokens and more.
BYTES_PER_TOKEN = 4.0
# An answer whose length is not known.
OUTPUT_TOKENS = 256


@dataclass
class ReadOptions:
    """How a trace is read. piece_tokens: tokens for which an id stands. bytes_per_token: of text, where there is no
    tokenizer. output_tokens: of an answer whose length the trace does not say. notes: readers add what they found to
    be estimated or left out, once each."""

    piece_tokens: int
    bytes_per_token: float = BYTES_PER_TOKEN
    output_tokens: int = OUTPUT_TOKENS
    tokenize: Tokenize | None = None
    notes: dict[str, None] = field(default_factory=dict)

    def note(self, sentence: str) -> None:
        self.notes[sentence] = None


class Reader(Protocol):
    def __call__(self, path: Path, lines: Iterator[Line], options: ReadOptions) -> Iterator[Request]:
        """The requests of a file, in any order, with times in seconds since any moment. Raises TraceError."""
        ...
