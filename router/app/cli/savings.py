# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter savings`: the prompt tokens that were not computed, by day and model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from kvrouter.contract.history import MAX_DAYS
from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, print_json, shaped
from kvrouter.router.base.common.errors import SettingError

# rich is imported where it is used, because the import takes longer than refusing a wrong flag.
if TYPE_CHECKING:
    from rich.table import Table

_SINCE = re.compile(r"([1-9][0-9]?)d?")

COUNTS = ("requests", "prompt_tokens", "reused_tokens", "round_robin_tokens")


@with_router
def savings(
    since: Annotated[
        str, typer.Option("--since", metavar="DAYS", help=f"how many days, today included: 1d to {MAX_DAYS}d")
    ] = "7d",
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="only this model")] = None,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Show the prompt tokens that were not computed, by day and model, with an estimate for round robin."""
    days = days_of(since)
    query = {"days": str(days)} | ({} if model is None else {"model": model})
    answer = client.call("GET", f"/savings?{urlencode(query)}")
    if as_json:
        print_json(answer)
        return
    rows = shaped(lambda: answer["days"])
    totals = shaped(lambda: totals_of(rows))
    if totals["requests"]:
        console().print(shaped(lambda: savings_table(rows, totals)))
        print()
    console(reads=True).print(meaning(totals, days), markup=False, highlight=False)


def days_of(since: str) -> int:
    """Return the number of days of a text like `7d`. Raises SettingError."""
    match = _SINCE.fullmatch(since)
    if match is None or int(match[1]) > MAX_DAYS:
        raise SettingError(f"--since {since}: write a number of days, 1d to {MAX_DAYS}d")
    return int(match[1])


def totals_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of all rows."""
    return {name: sum(row[name] for row in rows) for name in (*COUNTS, "saved_s")}


def savings_table(rows: list[dict[str, Any]], totals: dict[str, Any]) -> Table:
    """Return the table of the rows, with a last one for their sums."""
    from rich.table import Table

    from kvrouter.router.app.cli.tables import text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("DAY", "MODEL", "REQUESTS", "PROMPT TOKENS", "NOT COMPUTED", "ROUND ROBIN", "GPU SECONDS"):
        left = name in ("DAY", "MODEL")
        table.add_column(name, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    for row in rows:
        table.add_row(text(row["day"]), text(row["model"]), *_cells(row))
    table.add_row("total", "", *_cells(totals), style="bold")
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    from kvrouter.router.app.cli.tables import UNKNOWN, share, short_number

    prompt_tokens = row["prompt_tokens"]
    # Without a measured speed, no time is known for the tokens that were not computed.
    is_timed = row["saved_s"] or not row["reused_tokens"]
    return [
        short_number(row["requests"]),
        short_number(prompt_tokens),
        *(f"{short_number(row[name])} {share(row[name], prompt_tokens):>4}" for name in COUNTS[2:]),
        f"{row['saved_s']:,.1f}" if is_timed else UNKNOWN,
    ]


def meaning(totals: dict[str, Any], days: int) -> str:
    """Return a sentence that says what the sums mean."""
    from kvrouter.router.app.cli.tables import share, short_number

    when = "Today" if days == 1 else f"In the last {days} days"
    prompt_tokens, reused_tokens = totals["prompt_tokens"], totals["reused_tokens"]
    if not prompt_tokens:
        return f"{when}, no prompt was answered."
    seconds = (
        f"which saved about {totals['saved_s']:,.1f} GPU seconds of prefill at the measured speeds"
        if totals["saved_s"]
        else "and no worker's speed is measured yet, so the GPU seconds that this saved are not known"
    )
    return (
        f"{when}, {short_number(reused_tokens)} of {short_number(prompt_tokens)} prompt tokens "
        f"({share(reused_tokens, prompt_tokens)}) were not computed, {seconds}; the same prompts sent to the workers in "
        f"turn would have reused an estimated {share(totals['round_robin_tokens'], prompt_tokens)}."
    )
