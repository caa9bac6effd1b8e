# SPDX-License-Identifier: Apache-2.0
"""Claim: over HTTP and with real engines, the default policy is as good as simple rules where choosing by hits loses.

It reuses as much as the simplest rules do, spreads a popular beginning, and treats an engine that has just started like
any other.

Three worlds: `finding` (cold chats with a common beginning, one request at a time), `hot` (a long system prompt under
load), `restart` (an engine is killed with SIGKILL and started again; once on an idle fleet, once on a busy one). Each
policy gets a fresh fleet and the same traffic. The engines are `kvrouter sim` in real time, or vLLM's CPU build with a
tiny hybrid model, with the engine patch or without it. `session` is no policy of the router: the client sends each
session straight to the engine that its hash picks.

    make choice-live ARGS="--world finding --policy kv --policy round_robin"
    make choice-live ARGS="--engine vllm --no-patch --json FILE"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import parser_of

HERE = Path(__file__).resolve().parent
POLICIES = ("kv", "round_robin", "least_load", "session")


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--world", action="append", choices=("finding", "hot", "restart"), help="default: all")
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--no-patch", action="store_true", help="vLLM without the engine patch")
    parser.add_argument(
        "--policy", action="append", help=f"session, or one of `kvrouter serve`; default: {', '.join(POLICIES)}"
    )
    parser.add_argument("--load", type=float, help="of world hot: the share of all engines' work that the tails take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results there, after each policy")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.engine == "vllm":
        from benchmarks import engine_venv

        # `enter` returns only where vLLM is installed.
        engine_venv.enter()
    from benchmarks import choice_worlds
    from benchmarks.choice_fleet import real, simulated
    from benchmarks.report import machine

    # Ctrl-C ends the processes that were started, also where a shell has background jobs ignore it; SIGTERM does the
    # same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    make = real(not arguments.no_patch) if arguments.engine == "vllm" else simulated
    scenarios = choice_worlds.REAL if arguments.engine == "vllm" else choice_worlds.SIMULATED
    setting = {"engine": arguments.engine, "patch": not arguments.no_patch, "seed": arguments.seed}
    report: dict[str, Any] = {**setting, "commit": commit(), "machine": machine(), "scenarios": {}}
    try:
        for world in arguments.world or scenarios:
            for name, scenario in scenarios[world].items():
                if arguments.load is not None and isinstance(scenario, choice_worlds.Hot):
                    scenario = scenario._replace(load=arguments.load)
                results = report["scenarios"][name] = {"settings": scenario._asdict(), "policies": {}}
                for policy in arguments.policy or POLICIES:
                    print(f"{name}, {policy}", file=sys.stderr, flush=True)
                    results["policies"][policy] = measure(make, scenario, policy, arguments)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
                print(f"\n{name}\n\n{table(results['policies'])}", flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def measure(make: Any, scenario: Any, policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a scenario under a policy on a fresh fleet and return its result."""
    from benchmarks.choice_fleet import LiveFleet
    from benchmarks.choice_worlds import engine_flags, run

    # /tmp instead of the system's temporary folder, as the path of the router's private store must stay short.
    with tempfile.TemporaryDirectory(prefix="kvr-choice-", dir="/tmp") as folder, ExitStack() as stack:
        flags = engine_flags(scenario.blocks, scenario.prefill_rate, arguments.engine == "vllm")
        fleet = LiveFleet(Path(folder), stack, make, [flags] * scenario.replicas, policy)
        return asyncio.run(run(scenario, fleet, arguments.seed))


def commit() -> str:
    """Return the commit that is measured."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a table with a line for each figure and a column for each policy."""
    from benchmarks.report import markdown

    figures = list(next(iter(results.values())))
    lines = [["", *results]]
    lines += [[figure, *(str(result[figure]) for result in results.values())] for figure in figures]
    return markdown(lines)


if __name__ == "__main__":
    sys.exit(main())
