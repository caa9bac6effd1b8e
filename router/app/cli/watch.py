# SPDX-License-Identifier: Apache-2.0
"""A picture that is drawn again and again: in place on a terminal, block after block on a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrouter.router.app.cli.api_client import ClientError
from kvrouter.router.base.common.escaping import masked

# rich is imported where it is used: that takes longer than to refuse a wrong flag.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def watch(out: Console, draw: Callable[[], RenderableType], every_s: float) -> None:
    """Shows what `draw` returns under the time of day, now and every `every_s` seconds, until Ctrl-C. If it fails the
    first time, so does this; later its error stands in its place, as a router may be away while it restarts."""
    shown = _dated(draw())
    if not out.is_terminal:
        while True:
            out.print(shown)
            out.print()
            out.file.flush()
            time.sleep(every_s)
            shown = _drawn(draw)
    from rich.live import Live

    # The alternate screen: what was on the terminal is there again afterwards.
    with Live(shown, console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_drawn(draw), refresh=True)


def _drawn(draw: Callable[[], RenderableType]) -> RenderableType:
    from rich.text import Text

    try:
        return _dated(draw())
    except ClientError as error:
        return _dated(Text(masked(str(error)), style="red"))


def _dated(shown: RenderableType) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(Text(time.strftime("%H:%M:%S"), style="dim"), shown)
