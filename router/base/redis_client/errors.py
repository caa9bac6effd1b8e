# SPDX-License-Identifier: Apache-2.0
"""The errors of the store. Their texts never contain a password."""

from __future__ import annotations

# The length to which an unreadable value is cut: enough to recognise it in a sentence.
SHOWN_CHARS = 60


class StoreError(Exception):
    """A refusal by the store, or a value in it that no router writes. The message says what to do."""


class StoreUnavailable(StoreError):
    """A server that cannot be reached or cannot answer now. It is unknown whether the last command took effect."""


class StoredValueError(StoreError):
    """A value in the store that no router writes. Facts that depend on it are unknown; other keys are not affected."""

    def __init__(self, key: str, field: str, value: object) -> None:
        """Describe the value in one line.

        Args:
            key: The key that holds the value.
            field: The field of the key; empty if the key itself is wrong.
            value: The value, which the message shows in part.
        """
        place = f"{field} of {key}" if field else key
        super().__init__(
            f"Redis holds what no router writes: {place} is {_shown(value)}; correct or delete it, and let no "
            "other program write there"
        )
        self.key = key
        self.field = field


class ReplyError(StoreError):
    """An error reply. `code` is its first word, the protocol's error code (MOVED, NOAUTH, OOM, ...)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


# The code with which a server refuses writes after it failed to write to disk, and the fix.
DISK_REFUSAL = "MISCONF"
FREE_DISK = "free space on its disk, or fix what its log says of the disk"


def refusal_text(error: ReplyError) -> str:
    """Return a refusal as a sentence for people, with its fix if the server does not name it."""
    return f"{error}: {FREE_DISK}" if error.code == DISK_REFUSAL else str(error)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
