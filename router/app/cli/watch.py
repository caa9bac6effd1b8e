# SPDX-License-Identifier: Apache-2.0
"""A picture that is drawn repeatedly: in place on a terminal, block after block on a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrouter.router.app.cli.api_client import ClientError
from kvrouter.router.base.common.escaping import masked

# rich is imported where it is used, because the import takes longer than refusing a wrong flag.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def watch(out: Console, draw: Callable[[], RenderableType], every_s: float) -> None:
    """Show the result of `draw` under the time of day, now and every `every_s` seconds, until Ctrl-C.

    If the first call of `draw` fails, its ClientError is raised. Later an error is shown in place of the result,
    because a router may be away while it restarts.
    """
    picture = _dated(draw())
    if not out.is_terminal:
        while True:
            out.print(picture)
            out.print()
            out.file.flush()
            time.sleep(every_s)
            picture = _drawn(draw)
    from rich.live import Live

    # The alternate screen lets the previous contents of the terminal return afterwards.
    with Live(picture, console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_drawn(draw), refresh=True)


def _drawn(draw: Callable[[], RenderableType]) -> RenderableType:
    from rich.text import Text

    try:
        return _dated(draw())
    except ClientError as error:
        return _dated(Text(masked(str(error)), style="red"))


def _dated(picture: RenderableType) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(Text(time.strftime("%H:%M:%S"), style="dim"), picture)
