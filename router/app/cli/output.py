# SPDX-License-Identifier: Apache-2.0
"""The output of commands: a console as wide as its reader, JSON safe on a terminal, and answers of the right form."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvrouter.router.app.cli.api_client import ClientError
from kvrouter.router.base.common.escaping import printable_json

# rich is imported where it is used, because the import takes longer than refusing a wrong flag.
if TYPE_CHECKING:
    from rich.console import Console

# Wide enough for a row of any table if the output is not a terminal, so that no cell is cut for `grep`.
PIPE_WIDTH = 4_000


# The width of text that is read and not searched, if the output is not a terminal.
READING_WIDTH = 80


def console(*, folds: bool = True, reads: bool = False) -> Console:
    """Return a console for stdout. Colours are for terminals, and NO_COLOR turns them off.

    Args:
        folds: Whether lines wrap at the terminal's width and cells continue below. Otherwise the terminal itself breaks
            long lines.
        reads: Whether the output is text that wraps at words.
    """
    from rich.console import Console

    return Console() if folds and sys.stdout.isatty() else Console(width=READING_WIDTH if reads else PIPE_WIDTH)


def print_json(answer: Any) -> None:
    """Print the answer as indented JSON, with unprintable characters escaped."""
    print(printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()), flush=True)


def shaped(read: Callable[[], Any]) -> Any:
    """Return what `read` takes out of an answer. Raises ClientError if the answer has another form."""
    try:
        return read()
    except (AttributeError, KeyError, TypeError):
        raise ClientError("the answer does not come from a router of this version; check --url") from None
