# SPDX-License-Identifier: Apache-2.0
"""The options that all commands about a running router share, and the client made of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvrouter.router.app.cli.api_client import Client, client_context, router_url


def _option(variable: str, metavar: str, text: str) -> Any:
    return Annotated[str | None, typer.Option(envvar=variable, metavar=metavar, help=text)]


# The options by the name of their parameter, which gives the flag.
ROUTER_OPTIONS = {
    "url": _option(
        "KVROUTER_URL",
        "URL",
        "where the router listens, like localhost:30000; without it, on this machine at KVROUTER_PORT or 30000",
    ),
    "api_key": _option("KVROUTER_API_KEY", "KEY", "the router's API key"),
    "ca_file": _option("KVROUTER_CA_FILE", "FILE", "PEM file of authorities for https, in place of this machine's"),
    "client_certificate": _option(
        "KVROUTER_CLIENT_CERTIFICATE",
        "FILE",
        "PEM file with the certificate to show to a router that wants one, and its key",
    ),
    "client_key": _option(
        "KVROUTER_CLIENT_KEY", "FILE", "PEM file with the key of --client-certificate, where it is another one"
    ),
}
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]

# The parameter of a command that stands for all of them.
CLIENT = "client"


def with_router(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the options above in place of the parameter `client` of `run`.

    `client` then is a client of the router that the options or the environment name.
    """

    def command(**arguments: Any) -> None:
        url, api_key, *files = (arguments.pop(name) for name in ROUTER_OPTIONS)
        run(client=router_at(url, api_key, *files), **arguments)

    own = inspect.signature(run, eval_str=True).parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ROUTER_OPTIONS.items()
    ]
    command.__name__, command.__doc__, command.__annotations__ = run.__name__, run.__doc__, {}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own if parameter.name != CLIENT),
            *options,
        ]
    )
    return command


def router_at(
    url: str | None,
    api_key: str | None,
    ca_file: str | None = None,
    client_certificate: str | None = None,
    client_key: str | None = None,
) -> Client:
    """Return a client of the router that the options or the environment name. Raises SettingError."""
    address = router_url(url, os.environ)
    if not address.startswith("https:"):
        return Client(address, api_key)
    return Client(address, api_key, client_context(ca_file, client_certificate, client_key))
