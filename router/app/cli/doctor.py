# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter doctor`: the problems of a router and its fleet."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvrouter.router.app.cli.api_client import Client
from kvrouter.router.app.cli.options import AsJson, with_router
from kvrouter.router.app.cli.output import console, print_json
from kvrouter.router.base.common.errors import SettingError, UnknownCode
from kvrouter.router.base.common.escaping import printable

EXIT_FOUND = 1


@with_router
def doctor(
    explain: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="print the cause and the remedy of a code, like KV201; no router is queried"),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="write a zip archive to report a wrong prediction with, without prompts and keys"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="let --bundle replace an existing file")] = False,
    as_json: AsJson = False,
    *,
    client: Client,
) -> None:
    """Say what is wrong with a running router and its fleet, why, and how to fix it; exit code 1 if anything is."""
    from kvrouter.router.app.cli.doctor_report import diagnose, explanation_text, findings_text
    from kvrouter.router.observe.findings.explanations import explained_code

    out = console(reads=True)
    if explain is not None:
        try:
            explanation = explained_code(explain)
        except UnknownCode as error:
            raise SettingError(f"--explain: {error.message}") from None
        if as_json:
            print_json(msgspec.to_builtins(explanation))
        else:
            out.print(explanation_text(explanation, out.width), highlight=False, soft_wrap=True)
        return
    if bundle is not None:
        _bundle(client, bundle, force=force, as_json=as_json)
        return
    report = diagnose(client, client.url, time.time)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        out.print(findings_text(report, out.width), highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.ok else EXIT_FOUND)


def _bundle(client: Client, file: Path, *, force: bool, as_json: bool) -> None:
    """Write the archive, and list its files; the progress goes to stderr."""
    from kvrouter.router.app.cli.bundle import write_bundle

    def progress(name: str) -> None:
        print(f"collecting {name}", file=sys.stderr, flush=True)

    members = write_bundle(client, file, force=force, progress=progress)
    sizes = {member.name: len(member.content) for member in members}
    if as_json:
        print_json({"file": str(file), "bytes_by_name": sizes})
        return
    for name, size in sizes.items():
        print(f"{size:>9,}  {name}")
    print(f"wrote {printable(str(file))}, {file.stat().st_size:,} bytes; look through it before you share it")
