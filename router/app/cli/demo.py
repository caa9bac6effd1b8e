# SPDX-License-Identifier: Apache-2.0
"""The command `kvrouter demo`: its flags, and the prompts made of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvrouter.simulator.demo.trace import Prompt

# The limit of an answer's tokens. Answers in a trace may be long, and nobody reads them.
MAX_ANSWER_TOKENS = 24


def demo(
    replicas: Annotated[int, typer.Option(min=2, max=8, metavar="N", help="number of simulated replicas, 2 to 8")] = 4,
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="KV cache groups: gemma3, gpt-oss, qwen3-next or llama")
    ] = "gemma3",
    requests: Annotated[int, typer.Option(min=1, max=500, metavar="N", help="number of prompts, 1 to 500")] = 48,
    seed: Annotated[int, typer.Option(metavar="N", help="seed of the prompts")] = 7,
    policy: Annotated[
        str, typer.Option(help="how the router chooses: kv, round_robin, random, least_load, ...", metavar="NAME")
    ] = "kv",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="prompts of a trace, in any format of kvrouter replay; the first --requests"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="show each prompt and each replica as a row")
    ] = False,
    stay: Annotated[bool, typer.Option("--stay", help="go on with traffic until Ctrl-C, to look around")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows and the summary as JSON")] = False,
) -> None:
    """Start a router and simulated replicas, and compare every prediction with the actual reuse. Ends by itself."""
    from kvrouter.router.base.common.errors import SettingError
    from kvrouter.router.route.placement.policies import KV, OTHERS
    from kvrouter.simulator.demo.demo import DemoOptions, run_demo

    if policy not in (KV, *OTHERS):
        raise SettingError(f"--policy {policy} is not known; take one of {', '.join((KV, *OTHERS))}")
    options = DemoOptions(
        replicas=replicas,
        shape=shape,
        requests=requests,
        seed=seed,
        policy=policy,
        prompts=() if trace is None else prompts_of(trace, requests),
        name="" if trace is None else trace.name,
        json_output=as_json,
        verbose=verbose,
        stays=stay,
    )
    raise typer.Exit(run_demo(options))


def prompts_of(trace: Path, requests: int) -> list[Prompt]:
    """Return the trace's first requests as prompts. Raises TraceError.

    If the trace has no token ids, they are made up, but prompts share the same parts as in the trace.
    """
    import numpy as np

    from kvrouter.replay.traces.formats import AUTO, read_trace
    from kvrouter.simulator.cache.tokenizer import VOCABULARY
    from kvrouter.simulator.demo.trace import Prompt

    content = read_trace(trace, AUTO, requests=requests)
    pieces: dict[int, list[int]] = {}
    prompts = []
    for number, request in enumerate(content.requests):
        tokens: list[int] = []
        for piece in request.pieces.tolist():
            if piece not in pieces:
                rng = np.random.default_rng(piece)
                pieces[piece] = rng.integers(VOCABULARY, size=content.piece_tokens).tolist()
            tokens += pieces[piece]
        length = max(1, min(request.output_tokens, MAX_ANSWER_TOKENS))
        prompts.append(Prompt(number + 1, 1, tuple(tokens[: request.prompt_tokens]), length))
    return prompts
