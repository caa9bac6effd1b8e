# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter workers`: the workers as a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, print_json, shaped
from kvrouter.router.base.common.errors import SettingError

# rich is imported where it is used, because the import takes longer than refusing a wrong flag.
if TYPE_CHECKING:
    from rich.console import RenderableType

NO_WORKER = "no worker is registered; `kvrouter add ID=HTTP_URL`, or start `kvrouter serve` with --worker"
WATCH_S = 1.0
# A shorter interval could not be read.
WATCH_MIN_S = 0.05
WATCH_MAX_S = 86_400.0


@with_router
def workers(
    seconds: Annotated[
        float | None,
        typer.Argument(metavar="SECONDS", hidden=True),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="show the table every SECONDS (default: 1), until Ctrl-C")
    ] = False,
    wide: Annotated[bool, typer.Option("--wide", help="show all columns")] = False,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Show the workers: state, blocks held, load, predicted and delivered reuse, and why credit is withheld."""
    if seconds is not None and not watch:
        raise SettingError(
            f"{seconds:g} is the time between two tables of --watch; write `workers --watch {seconds:g}`"
        )
    if seconds is not None and not WATCH_MIN_S <= seconds <= WATCH_MAX_S:
        raise SettingError(f"--watch {seconds:g}: write a number of seconds, {WATCH_MIN_S:g} to {WATCH_MAX_S:g}")
    every_s = WATCH_S if seconds is None else seconds
    if as_json:
        print_json(client.call("GET", "/workers"))
        while watch:
            time.sleep(every_s)
            print_json(client.call("GET", "/workers"))
        return
    # A table with all columns, folded at 80 characters, would consist of slivers.
    out = console(folds=watch or not wide)
    if not watch:
        out.print(_drawn(client, out.width, wide))
        return
    from kvrouter.router.app.cli.watch import watch as keep_drawing

    keep_drawing(out, lambda: _drawn(client, out.width, wide), every_s)


def _drawn(client: Client, width: int, wide: bool) -> RenderableType:
    """Query the workers and return their table. Raises ClientError."""
    from rich.text import Text

    from kvrouter.router.app.cli.worker_table import loads_by_worker, narrow_table, wide_table

    answer = client.call("GET", "/workers")
    rows = shaped(lambda: answer["workers"])
    if not rows:
        return Text(NO_WORKER)
    if wide:
        return shaped(lambda: wide_table(rows))  # type: ignore[no-any-return]
    loads = client.call("GET", "/loads")
    return shaped(lambda: narrow_table(rows, loads_by_worker(loads), width))  # type: ignore[no-any-return]
