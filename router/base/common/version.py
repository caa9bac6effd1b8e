# SPDX-License-Identifier: Apache-2.0
"""The name and version of what is installed."""

from __future__ import annotations

from importlib.metadata import version

PACKAGE = "hybrid-kv-router"
VERSION = version(PACKAGE)
