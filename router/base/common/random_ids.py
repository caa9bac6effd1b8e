# SPDX-License-Identifier: Apache-2.0
"""Ids that nobody can guess. The random bytes of many come from one system call, which costs as much as one id."""

from __future__ import annotations

import os
from collections.abc import Callable

ID_BYTES = 16
IDS_AT_ONCE = 256


class RandomIds:
    """A call is a new id: 32 hexadecimal digits. Not for a process that forks. random_bytes: of the system."""

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._text = ""
        self._at = 0

    def __call__(self) -> str:
        at = self._at
        if at == len(self._text):
            self._text, at = self._random_bytes(ID_BYTES * IDS_AT_ONCE).hex(), 0
        self._at = at + 2 * ID_BYTES
        return self._text[at : self._at]
