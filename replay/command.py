# SPDX-License-Identifier: Apache-2.0
"""`kvrouter replay`: one trace through a virtual fleet under several policies, side by side."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from kvrouter.replay.fleet.fleet_shape import (
    CACHE_TOKENS,
    REPLICAS,
    TIMING,
    FleetShape,
    PeerSpeed,
    ReplicaShape,
    Restart,
    blocks_of,
    geometry_of,
)
from kvrouter.replay.policies.names import COMPARED, NAMES
from kvrouter.replay.policies.this_router import PULLING
from kvrouter.replay.report.comparison import POOLED, Comparison, FleetRow, compared
from kvrouter.replay.report.plots import check_plots, write_plots
from kvrouter.replay.report.table import text
from kvrouter.replay.runs.policy_run import PolicyRun, Summary
from kvrouter.replay.runs.pooled import pooled_reuse
from kvrouter.replay.runs.simulate import simulate
from kvrouter.replay.traces.formats import AUTO, FORMATS, read_trace, recognised
from kvrouter.replay.traces.reader import BYTES_PER_TOKEN, OUTPUT_TOKENS, ReadOptions
from kvrouter.replay.traces.request import Trace
from kvrouter.router.base.common.errors import SettingError
from kvrouter.simulator.cache.shapes import SHAPES
from kvrouter.simulator.engine.timing import Timing

Value = TypeVar("Value")

EXIT_INTERRUPTED = 130
WORKERS_MAX = 1024


@dataclass(frozen=True)
class ReplayOptions:
    """The options of the command line.

    Sizes are in tokens; 0 takes the size that the format or the shape has. A sequence about replicas has one value for
    all, or one for each.
    """

    trace: Path
    format: str = AUTO
    piece_tokens: int = 0
    bytes_per_token: float = BYTES_PER_TOKEN
    output_tokens: int = OUTPUT_TOKENS
    tokenizer: Path | None = None
    # How many requests of the trace are replayed; 0 for all.
    requests: int = 0
    shape: str = "gemma3"
    workers: int = REPLICAS
    block_tokens: int = 0
    cache_tokens: Sequence[int] = (CACHE_TOKENS,)
    cpu_tokens: Sequence[int] = (0,)
    timings: Sequence[Timing] = (TIMING,)
    restarts: Sequence[Restart] = ()
    speedup: float = 1.0
    policies: Sequence[str] = field(default=COMPARED)
    seed: int = 1
    csv: Path | None = None
    json: bool = False
    plot: Path | None = None
    # How fast a replica lends from its CPU tier; None if none does.
    peer: PeerSpeed | None = None


def run_replay(options: ReplayOptions) -> int:
    """Replay the trace and print the comparison. Raises SettingError.

    Returns the exit code: 130 after Ctrl-C, when the results so far are printed.
    """
    _check(options)
    if options.plot is not None:
        check_plots(options.plot)
    trace = _trace(options)
    shape = _fleet_shape(options, trace)
    runs = _runs(options, trace, shape)
    fleet = FleetRow(
        trace.name,
        trace.format,
        len(trace.requests),
        trace.prompt_tokens,
        trace.span_s,
        options.shape,
        options.block_tokens or trace.piece_tokens,
        options.workers,
        tuple(_for_each("--cache-tokens", options.cache_tokens, options.workers)),
        tuple(_for_each("--cpu-tokens", options.cpu_tokens, options.workers)),
        tuple(replica.timing.prefill_tokens_per_s for replica in shape.replicas),
        shape.restarts,
        options.speedup,
        options.seed,
        options.peer,
    )
    refusals = [f"{run.policy}: {run.refusal}" for run in runs if run.refused][:1]
    interrupted = len(runs) < len(options.policies) or any(run.partial for run in runs)
    pooled = None if interrupted else _pooled(trace, shape)
    comparison = compared(fleet, [run.summary() for run in runs], pooled, [*trace.notes, *refusals])
    if options.csv is not None:
        _write_csv(options.csv, comparison)
    if options.json:
        balance = {run.policy: run.load.rows() for run in runs}
        answer = {**msgspec.to_builtins(comparison), "in_flight": balance}
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print(text(comparison))
    if options.plot is not None and runs:
        for path in write_plots(options.plot, runs):
            print(f"wrote {path}", file=sys.stderr)
    return EXIT_INTERRUPTED if pooled is None else 0


def _check(options: ReplayOptions) -> None:
    """Raise SettingError for a value that is wrong for every trace."""
    if options.shape not in SHAPES:
        raise SettingError(f"--shape {options.shape} is not known; take one of {', '.join(SHAPES)}")
    if options.format not in (AUTO, *FORMATS):
        raise SettingError(f"--format {options.format} is not known; take one of {', '.join((AUTO, *FORMATS))}")
    for policy in options.policies:
        if policy not in NAMES:
            raise SettingError(f"--policy {policy} is not known; take one of {', '.join(NAMES)}")
    if PULLING in options.policies and options.peer is None:
        raise SettingError(f"--policy {PULLING}: say with --peer-gbytes-per-s how fast replicas lend")
    if options.peer is not None and not any(options.cpu_tokens):
        raise SettingError("--peer-gbytes-per-s: replicas lend from their CPU tiers; give --cpu-tokens as well")
    if not 1 <= options.workers <= WORKERS_MAX:
        raise SettingError(f"--workers {options.workers}: from 1 to {WORKERS_MAX}")
    least = [
        *(("--cache-tokens", tokens, 1) for tokens in options.cache_tokens),
        *(("--cpu-tokens", tokens, 0) for tokens in options.cpu_tokens),
        ("--block-tokens", options.block_tokens, 0),
        ("--piece-tokens", options.piece_tokens, 0),
        ("--output-tokens", options.output_tokens, 0),
        ("--requests", options.requests, 0),
    ]
    for name, value, lowest in least:
        if not lowest <= value <= 1 << 40:
            raise SettingError(f"{name} {value}: a number of tokens or requests, at least {lowest}")
    if not 0 < options.speedup < float("inf"):
        raise SettingError(f"--speedup {options.speedup:g}: a factor above 0")
    if not 0 < options.bytes_per_token <= 1 << 20:
        raise SettingError(f"--bytes-per-token {options.bytes_per_token:g}: a number above 0, about 4")


def _trace(options: ReplayOptions) -> Trace:
    name = recognised(options.trace) if options.format == AUTO else options.format
    reading = ReadOptions(
        options.piece_tokens or FORMATS[name].piece_tokens, options.bytes_per_token, options.output_tokens
    )
    if options.tokenizer is not None:
        from kvrouter.replay.traces.local_tokens import tokenizer_of

        reading.tokenize = tokenizer_of(options.tokenizer)
    size = options.trace.stat().st_size if options.trace.is_file() else 0
    with _bar(f"reading {options.trace.name}", size) as step:
        return read_trace(options.trace, name, reading, requests=options.requests, on_progress=step)


def _fleet_shape(options: ReplayOptions, trace: Trace) -> FleetShape:
    try:
        geometry = geometry_of(options.shape, options.block_tokens or trace.piece_tokens)
    except ValueError as error:
        raise SettingError(f"--block-tokens: {error}") from None
    sizes = zip(
        _for_each("--cache-tokens", options.cache_tokens, options.workers),
        _for_each("--cpu-tokens", options.cpu_tokens, options.workers),
        _for_each("--prefill-rate", options.timings, options.workers),
        strict=True,
    )
    replicas = (ReplicaShape(blocks_of(geometry, gpu), blocks_of(geometry, cpu), timing) for gpu, cpu, timing in sizes)
    try:
        return FleetShape(geometry, tuple(replicas), tuple(options.restarts), options.peer)
    except ValueError as error:
        raise SettingError(f"--restart: {error}") from None


def _for_each(name: str, values: Sequence[Value], workers: int) -> Sequence[Value]:
    """Return a value for each worker. Raises SettingError for a list of another length."""
    if len(values) not in (1, workers):
        raise SettingError(f"{name} has {len(values)} values for {workers} workers: give one, or one for each")
    return values if len(values) == workers else [values[0]] * workers


def _runs(options: ReplayOptions, trace: Trace, shape: FleetShape) -> list[PolicyRun]:
    """Run the policies one after another, up to the one that Ctrl-C ends."""
    runs: list[PolicyRun] = []
    for policy in options.policies:
        with _bar(policy, len(trace.requests)) as step:

            def count(placed: int, step: Callable[[int], None] = step) -> None:
                step(1)

            run = simulate(trace, shape, policy, options.seed, speedup=options.speedup, on_request=count)
        runs.append(run)
        if run.partial:
            break
    return runs


def _pooled(trace: Trace, shape: FleetShape) -> list[int] | None:
    """Return the tokens of each request that one pooled cache reuses, or None after Ctrl-C."""
    with _bar(POOLED, len(trace.requests)) as step:
        try:
            return pooled_reuse(trace, shape, on_request=lambda done: step(1))
        except KeyboardInterrupt:
            return None


def _write_csv(path: Path, comparison: Comparison) -> None:
    """Write one row for each policy and one for the bound, every number in full. Raises SettingError."""
    names = [field.name for field in msgspec.structs.fields(Summary)]
    try:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(names)
            rows.writerows([getattr(row, name) for name in names] for row in comparison.rows)
            if comparison.pooled is not None:
                bound = {"policy": POOLED, **msgspec.structs.asdict(comparison.pooled)}
                rows.writerow([bound.get(name, "") for name in names])
    except OSError as error:
        raise SettingError(f"cannot write --csv {path}: {error.strerror}") from None


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal. Yields a function that takes how much more is done."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=max(1, total))
        done = shown = 0
        # A refresh takes 100 us, and there are many thousand steps: a thousand refreshes are enough.
        unit = max(1, total // 1000)

        def step(more: int) -> None:
            nonlocal done, shown
            done += more
            if done - shown >= unit:
                shown = done
                progress.update(task, completed=done)

        yield step
