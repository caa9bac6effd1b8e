# SPDX-License-Identifier: Apache-2.0
"""`kvrouter demo` and `kvrouter sim`: the commands that need no engine."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    replicas: Annotated[int, typer.Option(min=2, max=8, help="number of simulated replicas")] = 3,
    shape: Annotated[str, typer.Option(help="KV cache groups: gemma3, gpt-oss, qwen3-next or llama")] = "gemma3",
    requests: Annotated[int, typer.Option(min=1, max=500, help="number of prompts")] = 48,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows and the summary as JSON")] = False,
) -> None:
    """Start a router and simulated replicas, and compare every prediction with the actual reuse. Ends by itself."""
    from kvrouter.simulator.demo.demo import run_demo

    raise typer.Exit(run_demo(replicas=replicas, shape=shape, requests=requests, seed=seed, json_output=as_json))


def sim(context: typer.Context) -> None:
    """Run simulated engine replicas: vLLM's scheduler and cache without a model."""
    from kvrouter.simulator.command import main as run_replica

    raise typer.Exit(run_replica(context.args))
