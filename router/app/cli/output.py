# SPDX-License-Identifier: Apache-2.0
"""How commands print: a console as wide as its reader, JSON that is safe on a terminal, answers of the right shape."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvrouter.router.app.cli.api_client import ClientError
from kvrouter.router.base.common.escaping import printable_json

# rich is imported where it is used: that takes longer than to refuse a wrong flag.
if TYPE_CHECKING:
    from rich.console import Console

# Wide enough for a row of any table when the output is no terminal, so that no cell is cut for `grep`.
PIPE_WIDTH = 4_000


# Of text that is read and not searched, where the output is no terminal.
READING_WIDTH = 80


def console(*, folds: bool = True, reads: bool = False) -> Console:
    """Of stdout. Colours are for terminals, and NO_COLOR turns them off. folds: lines end where the terminal does, and
    cells go on below; otherwise the terminal itself breaks what is too long. reads: for text that wraps at words."""
    from rich.console import Console

    return Console() if folds and sys.stdout.isatty() else Console(width=READING_WIDTH if reads else PIPE_WIDTH)


def print_json(answer: Any) -> None:
    print(printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()), flush=True)


def shaped(read: Callable[[], Any]) -> Any:
    """What `read` takes out of an answer. Raises ClientError where the answer has another shape."""
    try:
        return read()
    except (AttributeError, KeyError, TypeError):
        raise ClientError("the answer does not come from a router of this version; check --url") from None
