# SPDX-License-Identifier: Apache-2.0
"""The name and version of the installed package."""

from __future__ import annotations

from importlib.metadata import version

PACKAGE = "hybrid-kv-router"
VERSION = version(PACKAGE)
