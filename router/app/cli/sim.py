# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter sim`."""

from __future__ import annotations

import typer


def sim(context: typer.Context) -> None:
    """Run simulated engine replicas: vLLM's scheduler and cache without a model."""
    from kvrouter.simulator.command import main as run_replica

    raise typer.Exit(run_replica(context.args))
