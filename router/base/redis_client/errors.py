# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with the store. No text here ever contains a password."""

from __future__ import annotations

# Of a value that cannot be read: enough to recognise it in a sentence.
SHOWN_CHARS = 60


class StoreError(Exception):
    """The store refused, or holds what we did not write; says what to do."""


class StoreUnavailable(StoreError):
    """The server cannot be reached or cannot answer now. Whether the last command took effect is unknown."""


class StoredValueError(StoreError):
    """A value in the store that no router writes. It says nothing of any other key: only what depends on it is not
    known."""

    def __init__(self, key: str, field: str, value: object) -> None:
        """field: empty where the key itself is meant."""
        what = f"{field} of {key}" if field else key
        super().__init__(
            f"Redis holds what no router writes: {what} is {_shown(value)}; correct or delete it, and let no "
            "other program write there"
        )
        self.key = key
        self.field = field


class ReplyError(StoreError):
    """An error reply. `code` is its first word, which is the protocol's error code (MOVED, NOAUTH, OOM, ...)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


# The code with which a server refuses writes after it could not write to disk, and its fix.
DISK_REFUSAL = "MISCONF"
FREE_DISK = "free space on its disk, or mend what its log says of the disk"


def refusal_text(error: ReplyError) -> str:
    """Return a refusal as a sentence for people, with its fix if the server does not name it."""
    return f"{error}: {FREE_DISK}" if error.code == DISK_REFUSAL else str(error)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
