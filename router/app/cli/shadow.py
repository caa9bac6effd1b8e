# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter shadow`: how much another router reuses, compared with what could have been reused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import with_router
from kvrouter.router.app.cli.output import console
from kvrouter.router.base.common.errors import SettingError
from kvrouter.router.base.common.escaping import printable_json

# The run imports asyncio and aiohttp, which refusals do not need.
if TYPE_CHECKING:
    from kvrouter.shadow.tally import Report

DEFAULT_HOST = "127.0.0.1"
MAX_PORT = 65_535
ID_HEADER = "x-request-id"
MAX_AGE_S = 2.0
# Longer than nearly all answers take.
WAIT_S = 600.0
INTERVAL_S = 5.0
# The interval on a terminal, where the line is overwritten.
TERMINAL_INTERVAL_S = 0.5


@with_router
def shadow(
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="where your gateway sends copies of its requests")
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="the other router's log, a JSON object a line; - for stdin")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="read what is written to --log from now on")] = False,
    worker_header: Annotated[
        str | None, typer.Option(metavar="NAME", help="header of mirrored requests that names the worker")
    ] = None,
    id_header: Annotated[
        str, typer.Option(metavar="NAME", help="header of mirrored requests by which --log finds them")
    ] = ID_HEADER,
    max_age: Annotated[
        float, typer.Option(metavar="S", help="older requests are not judged: the index has moved on")
    ] = MAX_AGE_S,
    wait: Annotated[
        float, typer.Option(metavar="S", help="how long a mirrored request waits for its line in --log")
    ] = WAIT_S,
    interval: Annotated[
        float | None, typer.Option(metavar="S", help="between counters; 5, or 0.5 on a terminal")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print counters and report as JSON, one object a line")
    ] = False,
    *,
    client: Client,
) -> None:
    """Show what another router reuses of the engines' caches, and how much was there.

    It asks the router at --url, and touches no traffic. Ctrl-C, or the end of the log, ends it with a report.
    """
    if listen is None and log is None:
        raise SettingError("shadow needs traffic to look at: give --listen PORT, --log FILE, or both")
    if follow and log in (None, "-"):
        raise SettingError("--follow needs a file: give --log FILE")
    address = None if listen is None else read_address(listen)
    shows_line = not as_json and sys.stdout.isatty()
    every_s = (TERMINAL_INTERVAL_S if shows_line else INTERVAL_S) if interval is None else interval
    for flag, value in (("--max-age", max_age), ("--wait", wait), ("--interval", every_s)):
        if not 0 < value < float("inf"):
            raise SettingError(f"{flag} {value:g}: write seconds, more than 0")
    # A first call reports problems with the address or the key in the same words as every command.
    client.call("GET", "/workers")

    import asyncio

    from kvrouter.shadow.shadow_run import ShadowOptions, ShadowRun

    options = ShadowOptions(
        client.url, client.api_key, client.tls, address, log, follow, worker_header, id_header, max_age, wait, every_s
    )

    async def run(show: Callable[[Report], None]) -> Report:
        return await ShadowRun(options, clock=time.monotonic, wall=time.time).run(show, _started)

    if as_json:
        _print_json(asyncio.run(run(_print_json)))
        return
    from kvrouter.shadow.report_text import report_text

    with _live_line(shows_line) as show:
        report = asyncio.run(run(show))
    print(report_text(report))


def read_address(given: str) -> tuple[str, int]:
    """Return host and port of `8089`, `0.0.0.0:8089` or `[::1]:8089`; port 0 means a free one. Raises SettingError."""
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) <= MAX_PORT):
        raise SettingError(f"--listen {given}: write PORT or HOST:PORT, like 8089 or 0.0.0.0:8089")
    return host or DEFAULT_HOST, int(port)


def _started(line: str) -> None:
    print(f"kvrouter: {line}; Ctrl-C ends with the report", file=sys.stderr, flush=True)


def _print_json(report: Report) -> None:
    print(printable_json(msgspec.json.encode(report).decode()), flush=True)


@contextmanager
def _live_line(is_terminal: bool) -> Iterator[Callable[[Report], None]]:
    """Yield a function that shows the counters, in one line that is overwritten or in a new line each time."""
    from kvrouter.shadow.report_text import counters_line

    if not is_terminal:
        yield lambda report: print(counters_line(report), flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), transient=True, auto_refresh=False) as live:
        yield lambda report: live.update(Text(counters_line(report), no_wrap=True, overflow="ellipsis"), refresh=True)
