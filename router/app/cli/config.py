# SPDX-License-Identifier: Apache-2.0
"""The commands `kvrouter config`, which describe the settings and print an example."""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec

from kvrouter.router.app.cli.output import print_json
from kvrouter.router.model.config.settings import FIELDS, Config, describe, flag_of, metavar_of, reloads, variable_of


def config_schema() -> None:
    """Show the JSON schema of the settings file."""
    print_json(_schema())


def config_example() -> None:
    """Show a settings file with comments to start from: `kvrouter config example > kvrouter.yaml`."""
    print(resources.files("kvrouter.router.model.config").joinpath("example.yaml").read_text(encoding="utf-8"), end="")


def config_markdown() -> None:
    """Show the settings as a table of Markdown: docs/reference/settings.md."""
    print(_markdown(), end="")


def _schema() -> dict[str, Any]:
    """Return the JSON schema of the settings file."""
    (definition,) = msgspec.json.schema_components([Config], ref_template="#/$defs/{name}")[1].values()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **definition, "title": "Settings of kvrouter"}


def _markdown() -> str:
    """Return the table of docs/reference/settings.md."""
    rows = ["| setting | flag, environment | default | what to write | reloads |", "|---|---|---|---|---|"]
    for name, field in FIELDS.items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        text = describe(name).replace("|", "\\|")
        # Markdown renderers differ on how to escape a bar within code.
        value = metavar_of(name).replace("|", "/")
        names, live = f"`{flag_of(name)} {value}`, `{variable_of(name)}`", "yes" if reloads(name) else ""
        rows.append(f"| `{name}` | {names} | {default} | {text} | {live} |")
    return "\n".join(rows) + "\n"
