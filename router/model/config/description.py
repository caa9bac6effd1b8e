# SPDX-License-Identifier: Apache-2.0
"""The settings described for people and programs: their table, and the JSON schema of their file."""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.model.config.settings import FIELDS, Config, describe, flag_of, metavar_of, variable_of


def schema() -> dict[str, Any]:
    """The JSON schema of the settings file."""
    (own,) = msgspec.json.schema_components([Config], ref_template="#/$defs/{name}")[1].values()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **own, "title": "Settings of kvrouter"}


def markdown() -> str:
    """The table of docs/reference/settings.md."""
    rows = ["| setting | flag, environment | default | what to write |", "|---|---|---|---|"]
    for name, field in FIELDS.items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        told = describe(name).replace("|", "\\|")
        # Within code, renderers differ on what escapes a bar.
        value = metavar_of(name).replace("|", "/")
        rows.append(f"| `{name}` | `{flag_of(name)} {value}`, `{variable_of(name)}` | {default} | {told} |")
    return "\n".join(rows) + "\n"
