# SPDX-License-Identifier: Apache-2.0
"""The interface of every format's reader.

Another format is one module with a `Reader`, and its line in `formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.replay.traces.lines import Line
from kvrouter.replay.traces.request import Request

# Takes "chat" or "text" and a body as its client wrote it, and returns its token ids.
# Raises ValueError if a tokenizer alone cannot tokenize the body.
Tokenize: TypeAlias = Callable[[str, dict[str, Any]], NDArray[np.int64]]

# The usual ratio for English text and code with tokenizers of 100,000 tokens and more.
BYTES_PER_TOKEN = 4.0
# The length of an answer whose length is not known.
OUTPUT_TOKENS = 256


@dataclass
class ReadOptions:
    """Options for reading a trace, and the notes that readers add."""

    # Tokens that an id stands for.
    piece_tokens: int
    # Bytes of text in a token, if there is no tokenizer.
    bytes_per_token: float = BYTES_PER_TOKEN
    # Tokens of an answer whose length is not in the trace.
    output_tokens: int = OUTPUT_TOKENS
    tokenize: Tokenize | None = None
    # Sentences on the parts that are estimated or left out, once each.
    notes: dict[str, None] = field(default_factory=dict)

    def note(self, sentence: str) -> None:
        """Add a note, unless it is there already."""
        self.notes[sentence] = None


class Reader(Protocol):
    """The interface of a reader."""

    def __call__(self, path: Path, lines: Iterator[Line], options: ReadOptions) -> Iterator[Request]:
        """Yield the requests of a file, in any order, with times in seconds from any moment. Raises TraceError."""
        ...
