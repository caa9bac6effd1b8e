# SPDX-License-Identifier: Apache-2.0
"""Imported by a fork server, so that the routers that it forks have all of this already."""

from __future__ import annotations

from kvrouter.router.cli import commands
from kvrouter.router.server import app, supervisor
from kvrouter.router.server.warm_up import warm

IMPORTED = (commands, app, supervisor)

warm()
