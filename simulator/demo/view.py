# SPDX-License-Identifier: Apache-2.0
"""The demo's output: an opening, the verdict, and a table with --verbose. Only a terminal gets colours."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from kvrouter.simulator.cache.shapes import GroupShape
    from kvrouter.simulator.demo.summary import Row, Summary
    from kvrouter.simulator.demo.trace import DemoScene

# The usual width of a terminal; a row fits.
WIDTH = 80
# `480 g0`: a hit and the group that kept it from being longer.
CELL = 8
# With more replicas than this, or with longer prompts, the groups and some columns do not fit.
MANY_REPLICAS, LONG_PROMPT_TOKENS = 4, 1_000
KINDS = {"full_attention": "full attention", "sliding_window": "sliding window", "mamba": "Mamba"}


def _runs(groups: Sequence[GroupShape]) -> Iterator[tuple[int, int, GroupShape]]:
    """Yield the first and last index of each run of equal neighbours, with their shape."""
    first = 0
    for shape, alike in itertools.groupby(groups):
        count = len(list(alike))
        yield first, first + count - 1, shape
        first += count


def _share(tokens: int, summary: Summary) -> str:
    return f"{tokens} ({tokens / max(summary.prompt_tokens, 1):.0%})"


class View:
    """A printer to standard output, which prints nothing if `quiet`."""

    def __init__(self, replicas: int, longest: int, *, quiet: bool, console: Console | None = None) -> None:
        """Create a view; `longest` is the length of the longest prompt in tokens."""
        self._console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._replicas = replicas
        self._is_narrow = replicas > MANY_REPLICAS or longest >= LONG_PROMPT_TOKENS
        self._cell = len(str(longest)) + 1 if self._is_narrow else CELL

    def _say(self, text: str, style: str = "") -> None:
        """Print a paragraph, as wide as the table."""
        indent = len(text) - len(text.lstrip())
        self._console.print(Text(textwrap.fill(text, WIDTH, subsequent_indent=" " * (indent + 2)), style=style))

    def opening(self, shape: str, replicas: int, requests: int, name: str) -> None:
        """Print what is about to happen. `name` is the trace with the prompts, or "" if they are generated."""
        source = f" of {name}" if name else ""
        self._say(f"kvrouter demo: {requests} prompts{source}, {replicas} replicas of a {shape}-like model", "bold")
        self._say("  Starting the router, with its data in a temporary folder ...")

    def started(self, start_s: float, warmup: int, policy: str) -> None:
        """Print that the prompts are being sent."""
        by = "" if policy == "kv" else f" by policy {policy}"
        self._say(
            f"  Up after {start_s:.1f} s. Sending the prompts: the first {warmup} round robin, the others where kvrouter "
            f"chooses{by} ..."
        )
        self._console.print()

    def verdict(self, summary: Summary) -> None:
        """Print whether the predictions were right, and how many tokens the choices saved."""
        good = summary.exact_prompts == summary.prompts
        self._say(
            f"{summary.exact_checked} of {summary.checked} predictions were exact: {summary.prompts} prompts, each predicted "
            f"for {self._replicas} replicas and compared with what the replica reuses ({summary.nonzero_checked} of them hits).",
            "bold green" if good else "bold red",
        )
        if not good:
            self._say(
                f"Wrong: prompts {', '.join(map(str, summary.wrong_numbers))}; `--verbose` shows each of them.",
                "bold red",
            )
        self._say(
            f"Where kvrouter sent them, the replicas reused {_share(summary.reused_tokens, summary)} of "
            f"{summary.prompt_tokens} prompt tokens; round robin would have reused "
            f"{_share(summary.round_robin_reused_tokens, summary)}, and a router that knows full attention alone "
            f"{_share(summary.full_attention_reused_tokens, summary)}. Took {summary.seconds:.1f} s."
        )

    def table(self, scene: DemoScene, working_set: int, rows: list[Row], summary: Summary) -> None:
        """Print a row for each prompt, and how to read one."""
        groups = scene.geometry.groups
        layout = ", ".join(
            f"g{first}{f'-g{last}' if last > first else ''} {KINDS[shape.kind]}"
            + (f" of {shape.sliding_window} tokens" if shape.sliding_window else "")
            for first, last, shape in _runs(groups)
        )
        self._console.print()
        self._say(f"KV cache groups: {layout}; blocks of {groups[0].block_size} tokens.")
        self._say(
            f"GPU pool: {scene.num_blocks} blocks a replica; all prompts together fill {working_set}, so it evicts."
        )
        example = max(rows, key=lambda row: (max(row.real) - row.real[row.full_attention_choice], row.reused))
        for line in self._reading(example):
            self._say(line)
        self._console.print()
        workers = "".join(f"{f'w{i}':<{self._cell}}" for i in range(self._replicas))
        talk, promised, rival = ("", "", "") if self._is_narrow else (f"{'talk':>5} ", f"{'pred.':>6} ", " FA")
        head = f"{'#':>3} {talk}{'prompt':>6}  {workers}{'to':<6}{promised}{'reused':>6} ok{rival}"
        self._console.print(Text(head, style="bold"))
        for row in rows:
            self.row(row)
        self._console.print()
        self._say(
            f"Full attention alone expects more than it would get for {summary.full_attention_overpromised} of "
            f"{summary.prompts} prompts, and takes the wrong replica for {summary.full_attention_wrong}."
        )

    def _reading(self, row: Row) -> list[str]:
        """Return lines that explain how to read a row, with this row as the example."""
        hit, limit = row.predicted[row.chosen], row.limited_by[row.chosen]
        group = "" if limit is None or self._is_narrow else limit.split()[0]
        limited = f", and that {limit} limits it" if limit and group else ""
        by = " (rr: by round robin)" if row.by != "kvrouter" else ""
        lines = [
            f"Row {row.number}: `{f'{hit} {group}'.rstrip()}` below w{row.chosen}: kvrouter predicts that w{row.chosen} reuses "
            f"{hit} of {row.prompt_tokens} tokens{limited}. The prompt goes there{by}, and {row.reused} are reused; ok: right "
            "for all replicas."
        ]
        if not self._is_narrow:
            i = row.full_attention_choice
            lines.append(
                f"FA `w{i} {row.full_attention[i]}`: full attention alone expects {row.full_attention[i]} at w{i} (~: less is "
                "reused there; !: and another replica would reuse more)."
            )
        return lines

    def row(self, row: Row) -> None:
        """Print the result of one prompt."""
        talk = "" if self._is_narrow else f"{f'{row.conversation}.{row.turn}':>5} "
        line = Text(f"{row.number:>3} {talk}{row.prompt_tokens:>6}  ")
        for i, hit in enumerate(row.predicted):
            limit = None if self._is_narrow else row.limited_by[i]
            cell = f"{hit}" + (f" {limit.split()[0]}" if limit else "")
            line.append(f"{cell:<{self._cell}}", style="bold cyan" if i == row.chosen else "")
        by = f"w{row.chosen}" if row.by == "kvrouter" else f"w{row.chosen} rr"
        promised = "" if self._is_narrow else f"{row.promised:>6} "
        line.append(f"{by:<6}{promised}{row.reused:>6} ")
        line.append(self._mark(row.exact), style="green" if row.exact else "bold red")
        if not self._is_narrow:
            i = row.full_attention_choice
            line.append(f"w{i} {row.full_attention[i]}")
            if row.full_attention_wrong:
                line.append("!", style="bold red")
            elif row.full_attention_overpromised:
                line.append("~", style="yellow")
        line.rstrip()
        self._console.print(line)

    def _mark(self, good: bool) -> str:
        if self._console.encoding.startswith("utf"):
            return "✓  " if good else "✗  "
        return "y  " if good else "N  "

    def next_steps(self, shape: str, *, verbose: bool) -> None:
        """Print commands to try next."""
        self._console.print("\nNext:", style="bold")
        steps = [
            ("kvrouter serve --worker http://HOST:8000", "your own vLLM, from 0.31 on"),
            ("kvrouter demo --stay", "the same, to look at in a browser"),
            (f"kvrouter sim --shape {shape}", "one simulated replica to play with"),
            ("kvrouter demo --shape qwen3-next", "with Mamba; also gpt-oss, llama"),
        ]
        if not verbose:
            steps.insert(1, ("kvrouter demo --verbose", "each prompt, each replica"))
        for command, purpose in steps:
            self._console.print(f"  {command:<43} {purpose}")

    def staying(self, url: str) -> None:
        """Print where to look while traffic continues."""
        self._console.print()
        self._console.print(Text(f"The fleet in a browser: {url}/", style="bold cyan"))
        self._say("Traffic goes on through the router until Ctrl-C.")
        for command in ("workers", "tail", "explain --request ID", "doctor"):
            self._console.print(f"  kvrouter {command} --url {url}")

    def still(self, sent: int, reused_tokens: int, prompt_tokens: int) -> None:
        """Print the reuse so far."""
        self._say(f"  {sent} requests, {reused_tokens} of {prompt_tokens} prompt tokens reused")

    def stayed(self, sent: int) -> None:
        """Print that the traffic has stopped."""
        self._console.print(f"\nStopped after {sent} more requests.")
