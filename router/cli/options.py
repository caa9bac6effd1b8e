# SPDX-License-Identifier: Apache-2.0
"""The options that all commands about a running router share, and the client that they name."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvrouter.router.cli.api_client import Client, router_url

Url = Annotated[
    str | None,
    typer.Option(
        envvar="KVROUTER_URL",
        metavar="URL",
        help="where the router listens, like localhost:30000; without it, on this machine at KVROUTER_PORT or 30000",
    ),
]
Key = Annotated[
    str | None, typer.Option(envvar="KVROUTER_API_KEY", metavar="KEY", help="the router's API key", show_envvar=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]


def router_at(url: str | None, api_key: str | None) -> Client:
    """A client of the router that the options (or the environment) name. Raises SettingError."""
    return Client(router_url(url, os.environ), api_key)
