# SPDX-License-Identifier: Apache-2.0
"""The flags of the settings, one for each, made from the declaration of the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrouter.router.model.config.settings import FIELDS, LISTS, describe, flag_of, metavar_of


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
