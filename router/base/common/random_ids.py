# SPDX-License-Identifier: Apache-2.0
"""Ids that nobody can guess.

The random bytes of many ids come from one system call, because a call costs as much as making one id.
"""

from __future__ import annotations

import os
from collections.abc import Callable

ID_BYTES = 16
IDS_AT_ONCE = 256


class RandomIds:
    """A generator of ids: each call returns a new one of 32 hexadecimal digits.

    Do not use one in a process that forks, because parent and child would return the same ids. `random_bytes` returns
    the given number of random bytes, by default the system's.
    """

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._text = ""
        self._at = 0

    def __call__(self) -> str:
        """Return a new id."""
        at = self._at
        if at == len(self._text):
            self._text, at = self._random_bytes(ID_BYTES * IDS_AT_ONCE).hex(), 0
        self._at = at + 2 * ID_BYTES
        return self._text[at : self._at]
