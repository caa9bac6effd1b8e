# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter doctor`: the problems of a router and its fleet."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, print_json

EXIT_FOUND = 1


@with_router
def doctor(
    explain: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="print the cause and the remedy of a code, like KV201; no router is queried"),
    ] = None,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Say what is wrong with a running router and its fleet, why, and how to mend it; exit code 1 if anything is."""
    from kvrouter.router.app.cli.doctor_report import diagnose, explained, explanation_text, findings_text

    out = console(reads=True)
    if explain is not None:
        explanation = explained(explain)
        if as_json:
            print_json(msgspec.to_builtins(explanation))
        else:
            out.print(explanation_text(explanation, out.width), highlight=False, soft_wrap=True)
        return
    report = diagnose(client, client.url, time.time)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        out.print(findings_text(report, out.width), highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.ok else EXIT_FOUND)
