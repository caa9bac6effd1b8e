# SPDX-License-Identifier: Apache-2.0
"""The interface of every format's reader.

Another format is one module with a `Reader`, and its line in `formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrouter.replay.traces.lines import Line
from kvrouter.replay.traces.pieces import pieces_of_text, pieces_of_tokens
from kvrouter.replay.traces.request import Request

# Takes "chat" or "text" and a body as its client wrote it, and returns its token ids.
# Raises ValueError if a tokenizer alone cannot tokenize the body.
Tokenize: TypeAlias = Callable[[str, dict[str, Any]], NDArray[np.int64]]

# The usual bytes of text in a token, for English text and code and for vocabularies of 100,000 tokens and more.
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
    # Sentences about parts of the trace that are estimated or left out (keys of a dict, so that none occurs twice).
    notes: dict[str, None] = field(default_factory=dict)

    def note(self, sentence: str) -> None:
        """Add a note, unless it is there already."""
        self.notes[sentence] = None

    def pieces_of_prompt(
        self, kind: str, body: dict[str, Any], text: Callable[[], str]
    ) -> tuple[NDArray[np.uint64], int, int]:
        """Return the ids of a prompt's pieces, its tokens, and the bytes of text from which these were estimated; 0: exact.

        Args:
            kind: The kind of `body`, see `Tokenize`.
            body: The body for the tokenizer, if there is one.
            text: Returns the prompt as text, if no tokenizer can read it.
        """
        if self.tokenize is not None:
            try:
                tokens = self.tokenize(kind, body)
                return pieces_of_tokens(tokens, self.piece_tokens), len(tokens), 0
            except ValueError as error:
                self.note(f"the tokenizer could not read some prompts, which are estimated ({error})")
        else:
            self.note(
                f"prompt tokens are estimated from text, {self.bytes_per_token:g} bytes each; "
                "--tokenizer FOLDER makes them exact"
            )
        raw = text().encode("utf-8", "surrogatepass")
        return *pieces_of_text(raw, self.piece_tokens, self.bytes_per_token), len(raw)


# Yields the requests of a file, in any order, with times in seconds from any moment. Raises TraceError.
Reader: TypeAlias = Callable[[Path, Iterator[Line], ReadOptions], Iterator[Request]]
