# SPDX-License-Identifier: Apache-2.0
"""The demo's output: an opening, a line for each prompt, a closing. Colour on a terminal, plain text elsewhere."""

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

    def opening(
        self,
        shape: str,
        scene: DemoScene,
        replicas: int,
        requests: int,
        warmup: int,
        working_set: int,
        policy: str,
        name: str,
    ) -> None:
        """Print what is about to start. `name` is the trace that the prompts come from, empty if they are made."""
        groups = scene.geometry.groups
        layout = ", ".join(
            f"g{first}{f'-g{last}' if last > first else ''} {KINDS[shape.kind]}"
            + (f" of {shape.sliding_window} tokens" if shape.sliding_window else "")
            for first, last, shape in _runs(groups)
        )
        source = f" of {name}" if name else ""
        self._say(f"kvrouter demo: {requests} prompts{source}, {replicas} replicas of a {shape}-like model", "bold")
        self._say(f"  KV cache groups: {layout}; blocks of {groups[0].block_size} tokens")
        self._say(
            f"  GPU pool: {scene.num_blocks} blocks a replica; all prompts together fill {working_set}, so it evicts"
        )
        by = "" if policy == "kv" else f" by policy {policy}"
        self._say(f"  The first {warmup} prompts go round robin, as before a router came; then kvrouter chooses{by}.")
        self._say("  Starting the router (embedded Valkey, data in a temporary folder) ...")

    def header(self, start_s: float) -> None:
        """Print the table's head, and the meaning of its columns."""
        limit = "" if self._is_narrow else ", and the group that limits it"
        there = "reused" if self._is_narrow else "predicted and reused"
        columns = (
            f"  Up after {start_s:.1f} s. Columns: the tokens that kvrouter predicts each replica to reuse{limit}; where "
            f"the prompt goes (rr: round robin); tokens {there} there; ok: right for ALL replicas"
        )
        if not self._is_narrow:
            columns += (
                "; FA: where a router that sees full attention only goes, and the hit it expects (~: less is reused; "
                "!: and another replica would reuse more)"
            )
        self._say(f"{columns}.")
        self._console.print()
        workers = "".join(f"{f'w{i}':<{self._cell}}" for i in range(self._replicas))
        talk, promised, rival = ("", "", "") if self._is_narrow else (f"{'talk':>5} ", f"{'pred.':>6} ", " FA")
        head = f"{'#':>3} {talk}{'prompt':>6}  {workers}{'to':<6}{promised}{'reused':>6} ok{rival}"
        self._console.print(Text(head, style="bold"))

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

    def closing(self, shape: str, rows: list[Row], summary: Summary) -> None:
        """Print the result of the run, and commands to try next."""
        say = self._say
        good = summary.exact_prompts == summary.prompts
        self._console.print()
        say(
            f"kvrouter: {summary.exact_prompts} of {summary.prompts} prompts predicted exactly, on every replica "
            f"({summary.exact_checked} of {summary.checked} predictions, {summary.nonzero_checked} of them hits)",
            "bold green" if good else "bold red",
        )
        if not good:
            say(f"  wrong: prompts {', '.join(map(str, summary.wrong_numbers))}")
        say(
            f"Full attention only: believed in more than it would get for {summary.full_attention_overpromised} of "
            f"{summary.prompts} prompts, and would have taken the wrong replica for {summary.full_attention_wrong}."
        )
        worst = max(rows, key=lambda row: max(row.real) - row.real[row.full_attention_choice])
        if worst.full_attention_wrong:
            i = worst.full_attention_choice
            limit = worst.limited_by[i]
            why = f", because of {limit}" if limit else ""
            say(
                f"  E.g. prompt {worst.number}: it takes w{i} for {worst.full_attention[i]} tokens, which reuses "
                f"{worst.real[i]}{why}; w{worst.real.index(max(worst.real))} reuses {max(worst.real)}."
            )
        say(
            f"Of {summary.prompt_tokens} prompt tokens not computed again: kvrouter {summary.reused_tokens}, "
            f"full attention only {summary.full_attention_reused_tokens}, "
            f"round robin {summary.round_robin_reused_tokens} (each on a fleet of its own)."
        )
        saved = summary.reused_tokens - summary.round_robin_reused_tokens
        say(f"  That is {saved} tokens of prefill saved over round robin. Took {summary.seconds:.1f} s.")
        self._console.print("\nNext:", style="bold")
        for command, purpose in (
            ("kvrouter serve --worker w0=http://HOST:8000", "your own vLLM, from 0.31 on"),
            ("kvrouter demo --stay", "the same, to look at in a browser"),
            (f"kvrouter sim --shape {shape}", "one simulated replica to play with"),
            ("kvrouter demo --shape qwen3-next", "with Mamba; also gpt-oss, llama"),
        ):
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
