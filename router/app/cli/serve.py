# SPDX-License-Identifier: Apache-2.0
"""The commands `kvrouter serve` and `kvrouter epp`."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvrouter.router.app.server.checks import check_settings, local_tokenizers
from kvrouter.router.model.config.loading import Origin, given_flags, load_config
from kvrouter.router.model.config.settings import EPP_PORT, FIELDS, LISTS, describe, flag_of, metavar_of


def with_settings(run: Callable[[Path | None, dict[str, Any]], None]) -> Callable[..., None]:
    """Return a command with `--config` and a flag for each setting, which calls `run(config, flags)`.

    All values are text here, or None if they were not given. They are checked together with those of the file and the
    environment.
    """

    def command(config: Path | None, **flags: Any) -> None:
        run(config, flags)

    help_text = "settings as YAML [env: KVROUTER_CONFIG]"
    config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=help_text)]
    options = [_parameter("config", config), *(_parameter(name, _option(name)) for name in FIELDS)]
    command.__name__, command.__doc__, command.__annotations__ = run.__name__, run.__doc__, {}
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str) -> Any:
    text = describe(name).replace("a list of ", "may be repeated: ")
    default = FIELDS[name].default
    default_text = "" if default in (None, ()) else f" [default: {default}]"
    option = typer.Option(flag_of(name), metavar=metavar_of(name), help=text + default_text, show_default=False)
    return Annotated[list[str] | None if name in LISTS else str | None, option]


@with_settings
def serve(config: Path | None, flags: dict[str, Any]) -> None:
    """Run the router.

    Every setting can also come from the YAML file (port: 30000) or the environment (KVROUTER_PORT=30000; lists are
    separated by spaces, as in KVROUTER_WORKERS). Flags override the environment, which overrides the file.
    """
    _serve(config, flags)


@with_settings
def epp(config: Path | None, flags: dict[str, Any]) -> None:
    """Run the router as an endpoint picker of the Gateway API Inference Extension.

    The same as `kvrouter serve`, with the same settings; gateway_port is 9002 where it is not set. It needs the extra
    `gateway`.
    """
    _serve(config, flags, gateway_port=EPP_PORT)


def _serve(config: Path | None, flags: dict[str, Any], gateway_port: int | None = None) -> None:
    """Run the router; `gateway_port` is the port for gateways if the settings have none."""
    named = os.environ.get("KVROUTER_CONFIG")
    file = config if config is not None else Path(named) if named else None
    settings = load_config(file, os.environ, flags)
    origin = Origin(None if file is None else str(file), given_flags(flags), settings)
    if settings.gateway_port is None:
        settings = msgspec.structs.replace(settings, gateway_port=gateway_port)
    check_settings(settings, origin, os.environ)
    local = local_tokenizers(settings)
    # The modules of a router take a second to import; a refusal and the client commands need none of them. The
    # collector is off during the import, because all imported objects stay and it would find nothing.
    gc.disable()
    from kvrouter.router.app.server.app import serve as run_router
    from kvrouter.router.app.server.supervisor import supervise

    gc.freeze()
    gc.enable()
    if settings.processes > 1:
        # Each process loads its own tokenizers.
        local.clear()
    _run(lambda: run_router(settings, origin, local) if settings.processes == 1 else supervise(settings, origin))


def _run(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    # Imported here, because the import takes longer than refusing a wrong flag.
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start())
