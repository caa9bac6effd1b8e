# SPDX-License-Identifier: Apache-2.0
"""The commands `kvrouter config`, which describe the settings."""

from __future__ import annotations

from kvrouter.router.app.cli.output import print_json
from kvrouter.router.model.config.description import markdown, schema


def config_schema() -> None:
    """Show the JSON schema of the settings file."""
    print_json(schema())


def config_markdown() -> None:
    """Show the settings as a table of Markdown: docs/reference/settings.md."""
    print(markdown(), end="")
