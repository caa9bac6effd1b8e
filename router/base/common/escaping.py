# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere, made safe to show in a line of a log or on a terminal. Pure.

Characters that are not printable (`str.isprintable`: control characters, all line ends, marks that change the direction
of writing) could forge a line, move the cursor or reorder the text. They are shown as escape sequences.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` unchanged, or its Python form in quotes if it contains a character that is not printable."""
    return text if text.isprintable() else repr(text)


def masked(text: str) -> str:
    """Return `text` with a question mark for each character that is not printable; the length stays the same."""
    return "".join(c if c.isprintable() else "?" for c in text)


def printable_json(text: str) -> str:
    """Return the same JSON with unprintable characters escaped and its line ends kept.

    Other unprintable characters can only stand in strings, where JSON allows the escape.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
