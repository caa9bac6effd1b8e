# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere as it may be shown: in a line of a log, on a terminal. Pure.

What is not printable (`str.isprintable`: control characters, all line ends, marks that change the direction of writing)
could forge a line, move the cursor or swap what is read; it is shown as an escape sequence.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` itself, or its Python form in quotes where it holds what is not printable."""
    return text if text.isprintable() else repr(text)


def masked(text: str) -> str:
    """`text` with a question mark for each character that is not printable: as long as before."""
    return "".join(c if c.isprintable() else "?" for c in text)


def printable_json(text: str) -> str:
    """The same JSON, with the ends of its lines kept: whatever else is not printable can only stand in strings."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
