# SPDX-License-Identifier: Apache-2.0
"""The target of the console script `kvrouter`. Scripts that are installed name this module, so it stays where it is."""

from kvrouter.router.app.cli.commands import main

__all__ = ["main"]
