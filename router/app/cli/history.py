# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter history`: requests, reuse and times to the first token of the last minutes, hour or day."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from kvrouter.contract.history import Range
from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, print_json, shaped
from kvrouter.router.base.common.errors import SettingError

# rich is imported where it is used, because the import takes longer than refusing a wrong flag.
if TYPE_CHECKING:
    from rich.table import Table

RANGES = tuple(wanted.value for wanted in Range)
# The seconds of one row: about a dozen rows fill a terminal, and begin at full minutes or hours.
ROW_S = {Range.QUARTER: 60, Range.HOUR: 300, Range.DAY: 7_200}
# The sums that a row adds up over its steps.
SUMS = ("requests", "failed", "prompt_tokens", "delivered_tokens", "saved_s")
COLUMNS = ("BEGAN", "REQUESTS", "FAILED", "PROMPT TOKENS", "REUSED", "GPU SECONDS", "TTFT P50", "TTFT P95")
IN_WORDS = {Range.QUARTER: "15 minutes", Range.HOUR: "hour", Range.DAY: "24 hours"}


@with_router
def history(
    wanted: Annotated[
        str, typer.Option("--range", metavar="SPAN", help=f"how far back: {', '.join(RANGES)}")
    ] = Range.HOUR.value,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="only this model")] = None,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Show requests, failures, reuse and first tokens of the last minutes, hour or day, of all routers on one Redis."""
    if wanted not in RANGES:
        raise SettingError(f"--range {wanted}: write one of {', '.join(RANGES)}; kvrouter savings shows earlier days")
    chosen = Range(wanted)
    query = {"range": wanted} | ({} if model is None else {"model": model})
    answer = client.call("GET", f"/history?{urlencode(query)}")
    if as_json:
        print_json(answer)
        return
    totals = shaped(lambda: answer["totals"])
    if shaped(lambda: totals["requests"]):
        console().print(shaped(lambda: history_table(rows_of(answer, ROW_S[chosen]), totals, chosen)))
        print()
    elif model is not None and model not in shaped(lambda: answer["models"]):
        known = ", ".join(answer["models"]) or "none"
        raise SettingError(
            f"--model {model}: this model had no traffic in the last day, or is counted in `other`; models with traffic: {known}"
        )
    console(reads=True).print(shaped(lambda: meaning(totals, chosen)), markup=False, highlight=False)


def rows_of(answer: dict[str, Any], row_s: int) -> list[dict[str, Any]]:
    """Return the sums of the answer's steps by the row that they belong to, the oldest first.

    A row's time to the first token is that of its slowest step, because percentiles of steps cannot be added up.
    """
    series = answer["series"]
    rows: dict[int, dict[str, Any]] = {}
    for step, step_began_s in enumerate(answer["time_s"]):
        began_s = step_began_s - step_began_s % row_s
        row = rows.setdefault(
            began_s, {"began_s": began_s, "ttft_p50_s": None, "ttft_p95_s": None} | dict.fromkeys(SUMS, 0)
        )
        for name in SUMS:
            row[name] += series[name][step]
        for name in ("ttft_p50_s", "ttft_p95_s"):
            row[name] = max((row[name], series[name][step]), key=lambda seconds: -1.0 if seconds is None else seconds)
    return list(rows.values())


def history_table(rows: list[dict[str, Any]], totals: dict[str, Any], wanted: Range) -> Table:
    """Return the table of the rows, with a last one for the whole range."""
    from rich.table import Table

    # The first and the last row of a day may begin at the same time of day.
    form = "%d %H:%M" if wanted is Range.DAY else "%H:%M"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in rows:
        table.add_row(time.strftime(form, time.localtime(row["began_s"])), *_cells(row))
    table.add_row(f"all {wanted.value}", *_cells(totals), style="bold")
    return table


def _cells(sums: dict[str, Any]) -> list[str]:
    from kvrouter.router.app.cli.tables import UNKNOWN, share, short_number

    prompt_tokens = sums["prompt_tokens"]
    # Without a measured speed, no time is known for the tokens that were reused.
    is_timed = sums["saved_s"] or not sums["delivered_tokens"]
    return [
        short_number(sums["requests"]),
        short_number(sums["failed"]),
        short_number(prompt_tokens),
        f"{short_number(sums['delivered_tokens'])} {share(sums['delivered_tokens'], prompt_tokens):>4}",
        f"{sums['saved_s']:,.1f}" if is_timed else UNKNOWN,
        *(_seconds(sums[name]) for name in ("ttft_p50_s", "ttft_p95_s")),
    ]


def _seconds(seconds: float | None) -> str:
    from kvrouter.router.app.cli.tables import UNKNOWN

    return UNKNOWN if seconds is None else f"{seconds:.3f} s"


def meaning(totals: dict[str, Any], wanted: Range) -> str:
    """Return a sentence that says what the sums mean."""
    from kvrouter.router.app.cli.tables import share, short_number

    when = f"In the last {IN_WORDS[wanted]}"
    requests = totals["requests"]
    if not requests:
        return f"{when}, no request ended."
    first = (
        "no answer was streamed"
        if totals["ttft_p95_s"] is None
        else f"half of the streamed answers began within {_seconds(totals['ttft_p50_s'])}, 95 of 100 within "
        f"{_seconds(totals['ttft_p95_s'])}"
    )
    return (
        f"{when}, {short_number(requests)} requests ended and {short_number(totals['failed'])} of them "
        f"({share(totals['failed'], requests)}) failed; engines report {short_number(totals['delivered_tokens'])} of "
        f"{short_number(totals['prompt_tokens'])} prompt tokens as reused; {first}. A row's time to the first token is "
        "that of its slowest step."
    )
