# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter tail`: the fleet's events, one line each."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvrouter.router.app.cli.api_client import Client, ClientError
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, shaped
from kvrouter.router.base.common.escaping import masked, printable_json

# rich is imported where it is used, because the import takes longer than refusing a wrong flag.
if TYPE_CHECKING:
    from rich.text import Text

# The pause before a reconnect doubles from the first to the last value.
RETRY_FIRST_S = 0.5
RETRY_LAST_S = 5.0

COLOURS = {
    "stored": "green",
    "removed": "dim",
    "cleared": "yellow",
    "epoch": "magenta",
    "gap": "bold red",
    "resync": "yellow",
    "state": "cyan",
    "decision": "blue",
    "outcome": "blue",
    "lost": "bold red",
}


@with_router
def tail(
    types: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE,...",
            help="only these: stored, removed, cleared, epoch, gap, resync, state, decision, outcome",
        ),
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="ID", help="only this worker; may be repeated")] = None,
    model: Annotated[list[str] | None, typer.Option(metavar="NAME", help="only this model; may be repeated")] = None,
    hashes: Annotated[bool, typer.Option("--hashes", help="with --json: with the blocks' hashes")] = False,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Follow the events of the fleet, one line each, until Ctrl-C; reconnects when the router comes back."""
    query: list[tuple[str, str]] = [("worker", name) for name in worker or ()] + [
        ("model", name) for name in model or ()
    ]
    query += [("type", types)] if types else []
    query += [("hashes", "true")] if hashes else []
    out = console(folds=False)
    last_id, pause_s = "", RETRY_FIRST_S
    while True:
        try:
            for event_id, data in client.events(query, last_id):
                last_id, pause_s = event_id, RETRY_FIRST_S
                if as_json:
                    print(printable_json(data), flush=True)
                else:
                    out.print(_line(data), soft_wrap=True)
            problem = "the router ended the stream"
        except ClientError as error:
            if not last_id or error.status is not None:
                raise
            problem = str(error)
        print(f"kvrouter: {problem}; connecting again", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_LAST_S)


def _line(data: str) -> Text:
    from rich.text import Text

    event = shaped(lambda: msgspec.json.decode(data, type=dict[str, Any]))
    kind = shaped(lambda: event["type"])
    moment = time.strftime("%H:%M:%S", time.localtime(shaped(lambda: event["time_s"])))
    thousandths = int(event["time_s"] * 1000) % 1000
    text = Text(f"{moment}.{thousandths:03d} ", style="dim")
    text.append(f"{kind:<9}", style=COLOURS.get(kind, ""))
    text.append(f"{_worker(event):<12} ", style="bold")
    text.append(masked(shaped(lambda: _about(event))))
    return text


def _worker(event: dict[str, Any]) -> str:
    if "worker_id" not in event:
        return ""
    rank = event.get("dp_rank") or 0
    return masked(f"{event['worker_id']}@{rank}" if rank else str(event["worker_id"]))


def _about(event: dict[str, Any]) -> str:
    kind, reason = event["type"], event.get("reason", "")
    if kind in ("stored", "removed"):
        group = "-" if event["group_idx"] is None else event["group_idx"]
        owner = f" {event['owner']}" if "owner" in event else ""
        seq = f", seq {event['seq']}" if "seq" in event else ""
        return f"{event['blocks']} block{'s' if event['blocks'] != 1 else ''}, group {group} on {event['medium']}{owner}{seq}"
    if kind == "state":
        credit = "" if event["credited"] else ", no credit"
        return f"{event['state']}{credit}" + (f": {reason}" if reason else "")
    if kind == "decision":
        skipped = f" ({event['skipped']} decisions before it are not shown)" if "skipped" in event else ""
        return f"{event['num_tokens']} tokens: {reason}{skipped}"
    if kind == "outcome":
        return _outcome(event)
    if kind == "epoch":
        return f"{event['epoch']}" + (f": {reason}" if reason else "")
    times = f"{event['count']} times: " if event.get("count", 1) > 1 else ""
    return f"{times}{reason}"


def _outcome(event: dict[str, Any]) -> str:
    """Return the outcome of a request as text: how it ended, its status, and predicted and delivered tokens."""
    outcome, tokens = str(event["outcome"]).replace("_", " "), []
    if event["failed"]:
        outcome = f"failed: {outcome}"
    if "status" in event:
        outcome += f", status {event['status']}"
    if "predicted_tokens" in event:
        tokens.append(f"{event['predicted_tokens']} tokens predicted")
    if "delivered_tokens" in event:
        tokens.append(
            f"{event['delivered_tokens']} delivered" if tokens else f"{event['delivered_tokens']} tokens delivered"
        )
    return ", ".join((outcome, *tokens, f"after {event['e2e_s']:.3f} s, selection {event['selection_id']}"))
