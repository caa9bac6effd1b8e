# SPDX-License-Identifier: Apache-2.0
"""Claim: on any shape of traffic, the router's policy is as good as the best simpler rule.

    python -m benchmarks.choice_shapes run --results FILE [--seed N] [--shapes FROM:TO,...] [--rotations FROM:TO,...]
        [--longer N] [--vary FIELD=VALUE]... [--chance N] [--policy NAME]... [--label NAME] [--set CONSTANT=VALUE]...
        [--jobs N]
    python -m benchmarks.choice_shapes report --results FILE... [--label NAME] [--json FILE] [--plot FOLDER]
    python -m benchmarks.choice_shapes chance --results FILE --again FILE... [--policy NAME]...
    python -m benchmarks.choice_shapes list [--seed N] [--shapes FROM:TO,...]

`run` draws shapes from a seed (traffic/shape.py) and runs each policy over each in virtual time, as `kvrouter replay`
does. `pooled` is one cache with all the memory, and `endless` one whose memory never ends, which no choice can surpass.
A run that the file already has is not repeated, so the command can be stopped with Ctrl-C and continued. `--label`
names the runs of `kv`, to compare versions of it. `--set route.placement.cost.DELAY_WEIGHT=16` gives a constant of
`kvrouter.router`, in the file that uses it, another value, to see how much it matters. `--longer 4` gives each shape
four times as many requests, and memory in proportion, which shows the costs that arise only once at the beginning.
`--vary turns=3` changes a field of each shape (`list` shows them). Keep the results of these two flags in separate
files. `report` compares kv with the peers, each figure with the best peer of that very figure.

`--chance 2` gives the policies another seed for their random decisions, such as ties. `chance` compares the usual runs
with the best of such runs: the distance of a policy from itself bounds what a comparison with others can show.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_type_hints

import msgspec

from benchmarks.report import parser_of
from benchmarks.traffic.outcome import ENDLESS, POOLED, Outcome, by_shape, mean, verdict
from benchmarks.traffic.prompts import trace_and_fleet
from benchmarks.traffic.report import BAR, report_text, report_values
from benchmarks.traffic.shape import Shape, draw, draw_rotation
from kvrouter.replay.policies.names import COMPARED, OWN
from kvrouter.replay.runs.pooled import endless_reuse, pooled_reuse
from kvrouter.replay.runs.simulate import simulate

# `full_attention_only` uses this router's own load and progress, which no peer has.
PEERS = tuple(name for name in COMPARED if name not in (OWN, "full_attention_only"))
CHOICES = (OWN, *PEERS, POOLED, ENDLESS)


def run_policy(shape: Shape, policy: str, label: str, chance: int) -> Outcome:
    """Run one policy over one shape.

    Args:
        shape: The traffic and its fleet.
        policy: The policy to run, POOLED or ENDLESS.
        label: The policy's name in the outcome.
        chance: The seed of the policy's random decisions.
    """
    begun_s = time.perf_counter()
    trace, fleet = trace_and_fleet(shape)
    if policy in (POOLED, ENDLESS):
        reused = sum(pooled_reuse(trace, fleet) if policy == POOLED else endless_reuse(trace, fleet.geometry))
        values = (len(trace.requests), trace.prompt_tokens, reused, 0.0, 0.0, 1.0)
    else:
        summary = simulate(trace, fleet, policy, chance).summary()
        values = (
            summary.requests,
            summary.prompt_tokens,
            summary.reused_tokens,
            summary.ttft_mean_s,
            summary.ttft_p99_s,
            summary.span_s,
        )
    return Outcome(shape.seed, shape.number, shape.is_rotation, label, *values, time.perf_counter() - begun_s)


def set_constants(values: Sequence[tuple[str, str, float]]) -> None:
    """Give constants of the router other values in this process.

    Args:
        values: The module, the name and the new value of each constant.
    """
    for module, name, value in values:
        setattr(importlib.import_module(module), name, value)


def constant(text: str) -> tuple[str, str, float]:
    """Parse WING.ROOM.FILE.NAME=VALUE into the module, the name and the value of a constant."""
    path, _, value = text.partition("=")
    module, _, name = f"kvrouter.router.{path}".rpartition(".")
    try:
        old = getattr(importlib.import_module(module), name)
        return module, name, type(old)(value)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not like route.placement.cost.DELAY_WEIGHT=16: {error}"
        ) from None


def change(text: str) -> tuple[str, object]:
    """Parse FIELD=VALUE into the field of a shape and its value."""
    name, _, value = text.partition("=")
    try:
        return name, msgspec.convert(value, get_type_hints(Shape)[name], strict=False)
    except (KeyError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like turns=3: {error}") from None


def _task(task: tuple[Shape, str, str, int]) -> Outcome:
    return run_policy(*task)


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that the file lacks."""
    if arguments.set and not arguments.label:
        sys.exit("--set makes another kv: name it with --label")
    shapes = [draw(arguments.seed, number) for number in arguments.shapes]
    shapes += [draw_rotation(arguments.seed, number) for number in arguments.rotations]
    shapes = [
        msgspec.structs.replace(shape, requests=shape.requests * arguments.longer, **dict(arguments.vary))
        for shape in shapes
    ]
    path: Path = arguments.results
    done = {(outcome.seed, outcome.number, outcome.rotation, outcome.policy) for outcome in read([path])}
    tasks = []
    for shape in shapes:
        for policy in arguments.policy or CHOICES:
            label = (arguments.label or policy) if policy == OWN else policy
            if (shape.seed, shape.number, shape.is_rotation, label) not in done:
                tasks.append((shape, policy, label, arguments.chance))
    begun_s = time.monotonic()
    with path.open("ab") as file, multiprocessing.Pool(arguments.jobs, set_constants, [arguments.set]) as pool:
        try:
            for count, finished in enumerate(pool.imap_unordered(_task, tasks), 1):
                file.write(msgspec.json.encode(finished) + b"\n")
                file.flush()
                if count % 50 == 0 or count == len(tasks):
                    print(f"{count} of {len(tasks)} runs, {time.monotonic() - begun_s:.0f} s", file=sys.stderr)
        except KeyboardInterrupt:
            pool.terminate()
            return 130
    return 0


def read(paths: Iterable[Path]) -> list[Outcome]:
    """Return the outcomes in some files; a file that does not exist has none."""
    decoder = msgspec.json.Decoder(Outcome)
    return [decoder.decode(line) for path in paths if path.exists() for line in path.read_bytes().splitlines()]


def report(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    shapes = by_shape(read(arguments.results))
    comparison = report_values(shapes, arguments.label or OWN, PEERS)
    if not comparison.rows:
        needed = (arguments.label or OWN, *PEERS, POOLED, ENDLESS)
        lacking = [name for name in needed if not any(name in runs for runs in shapes.values())]
        sys.exit(f"no shape has all runs; none has {', '.join(lacking)}" if lacking else "no shape has all runs")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(msgspec.to_builtins(comparison), indent=1) + "\n")
    if arguments.plot is not None:
        from benchmarks.traffic.plots import write_plots

        write_plots(arguments.plot, comparison)
    print(report_text(comparison))
    return 0


def compare_chance(arguments: argparse.Namespace) -> int:
    """Print how each policy compares with its own runs under other random seeds, as if those were its peers."""
    usual, others = by_shape(read([arguments.results])), [by_shape(read([path])) for path in arguments.again]
    print(
        "| policy | shapes | reuse, mean | among soon, worst | first token: mean, worst, below 0.97 | ahead in both |"
    )
    print("|---|---|---|---|---|---|")
    for policy in arguments.policy or [OWN, *PEERS]:
        verdicts = []
        for key, runs in usual.items():
            again = [other[key][policy] for other in others if policy in other.get(key, {})]
            if policy in runs and len(again) == len(others):
                verdicts.append(verdict(runs[policy], again, runs[policy], runs[policy]))
        if verdicts:
            ttft = [each.ttft for each in verdicts]
            print(
                f"| {policy} | {len(verdicts)} | {mean(each.reuse for each in verdicts):.3f} | "
                f"{min(each.reuse_among_soon for each in verdicts):.3f} | {mean(ttft):.3f}, {min(ttft):.3f}, "
                f"{mean(ratio < BAR for ratio in ttft):.0%} | {mean(bool(each.ahead) for each in verdicts):.1%} |"
            )
    return 0


def list_shapes(arguments: argparse.Namespace) -> int:
    """Print the shapes, one a line."""
    for number in arguments.shapes:
        print(msgspec.json.encode(draw(arguments.seed, number)).decode())
    return 0


def numbers(text: str) -> list[int]:
    """Parse ranges FROM:TO and single numbers, separated by commas, into a list of numbers."""
    parsed: list[int] = []
    for part in text.split(","):
        first, colon, end = part.partition(":")
        parsed += range(int(first), int(end) if colon else int(first) + 1)
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="make the runs that the file lacks")
    running.set_defaults(call=run)
    running.add_argument("--results", type=Path, required=True, help="one JSON object a run")
    running.add_argument("--policy", action="append", choices=CHOICES, help="all, unless given")
    running.add_argument("--label", help="the name of kv's runs")
    running.add_argument(
        "--set",
        type=constant,
        action="append",
        default=[],
        metavar="CONSTANT=VALUE",
        help="route.placement.cost.DELAY_WEIGHT=16",
    )
    running.add_argument("--jobs", type=int, default=2, help="processes")
    running.add_argument("--rotations", type=numbers, default=[], help="shapes of strict rotation")
    running.add_argument("--longer", type=int, default=1, metavar="N", help="this many times as many requests")
    running.add_argument(
        "--vary",
        type=change,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="turns=3: another field of each shape",
    )
    running.add_argument("--chance", type=int, default=1, metavar="N", help="the seed of what policies leave to chance")
    again = commands.add_parser("chance", help="compare policies with themselves")
    again.set_defaults(call=compare_chance)
    again.add_argument("--results", type=Path, required=True, help="the usual runs")
    again.add_argument(
        "--again", type=Path, nargs="+", required=True, help="runs with other values of --chance, a file for each"
    )
    again.add_argument("--policy", action="append", choices=[OWN, *PEERS], help="all, unless given")
    listing = commands.add_parser("list", help="print the shapes")
    listing.set_defaults(call=list_shapes)
    for command in (running, listing):
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--shapes", type=numbers, default=numbers("0:20"), help="FROM:TO, or single numbers")
    reporting = commands.add_parser("report", help="compare kv with the peers")
    reporting.set_defaults(call=report)
    reporting.add_argument("--results", type=Path, nargs="+", required=True)
    reporting.add_argument("--label", help="the name of kv's runs")
    reporting.add_argument("--json", type=Path, help="also write the comparison there")
    reporting.add_argument("--plot", type=Path, help="also draw it into this folder")
    options = parser.parse_args(arguments)
    return int(options.call(options))


if __name__ == "__main__":
    sys.exit(main())
