# SPDX-License-Identifier: Apache-2.0
"""A sequence lock over two words of memory that processes share; the compiled version is `seqlock.pyx`.

One process writes, any number read. The writer never waits for a reader longer than POLITE_PAUSES, and a reader takes
no lock: it reads, and reads again if the writer wrote meanwhile. So a reader that dies holds up nobody.

This module replaces the compiled one where there was no C compiler. One thread then reads and writes, because Python's
stores have no order that another processor could rely on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Seqlock:
    """The version of data that changes in sections, which begin and end with the writer's calls.

    The version is odd during a section, and another even number after it.
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        """Use these two words, all zero before the first use: the version, and whether a reader asks for a pause."""
        self.words = words
        # How many sections are open, one in another.
        self.depth = 0

    def begin(self) -> None:
        """Begin a section, after a short pause if a reader wants one. A section in a section changes nothing."""
        self.depth += 1
        if self.depth == 1:
            self.words[1] = 0
            self.words[0] |= np.uint64(1)

    def end(self) -> None:
        """End a section; with the outermost one, what was written in it is complete."""
        self.depth -= 1
        if self.depth == 0:
            self.words[0] += np.uint64(1)

    def version(self) -> int:
        """Return the present version, for `is_at`."""
        return int(self.words[0])

    def is_at(self, version: int) -> bool:
        """Return whether everything that was read since `version` was returned belongs to that version."""
        return int(self.words[0]) == version

    def ask_for_a_pause(self) -> None:
        """Ask the writer to pause for a moment before its next section, because a reader meets sections again and again."""
        self.words[1] = 1

    def pause(self, tries: int) -> None:
        """Let other processes run for a moment, longer after many tries of a reader."""
