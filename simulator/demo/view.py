# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: an opening, a line a prompt, a closing. Colour on a terminal, plain text elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from kvrouter.simulator.cache.shapes import GroupShape
    from kvrouter.simulator.demo.summary import Row, Summary
    from kvrouter.simulator.demo.trace import DemoScene

# `480 g0`: a hit and the group that kept it from being longer.
CELL = 8
KINDS = {"full_attention": "full attention", "sliding_window": "sliding window", "mamba": "Mamba"}


def _runs(groups: Sequence[GroupShape]) -> Iterator[tuple[int, int, GroupShape]]:
    """First and last index of neighbours that are alike, with their shape."""
    first = 0
    for shape, alike in itertools.groupby(groups):
        count = len(list(alike))
        yield first, first + count - 1, shape
        first += count


class View:
    """Prints to standard output; nothing when `quiet`."""

    def __init__(self, replicas: int, *, quiet: bool, console: Console | None = None) -> None:
        self._console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._replicas = replicas

    def opening(
        self, shape: str, scene: DemoScene, replicas: int, requests: int, warmup: int, working_set: int
    ) -> None:
        """What is about to be started."""
        groups = scene.geometry.groups
        layout = ", ".join(
            f"g{first}{f'-g{last}' if last > first else ''} {KINDS[shape.kind]}"
            + (f" of {shape.sliding_window} tokens" if shape.sliding_window else "")
            for first, last, shape in _runs(groups)
        )
        say = self._console.print
        say(Text(f"kvrouter demo: {requests} prompts, {replicas} replicas of a {shape}-like model", style="bold"))
        say(f"  KV cache groups: {layout}; blocks of {groups[0].block_size} tokens")
        say(f"  GPU pool: {scene.num_blocks} blocks a replica; all prompts together fill {working_set}, so it evicts")
        say(f"  The first {warmup} prompts go round robin, as before a router came; then kvrouter chooses.")
        say("  Starting the router (embedded Valkey, data in a temporary folder) ...")

    def header(self, start_s: float) -> None:
        """The table's head, with what its columns mean."""
        say = self._console.print
        say(f"  Up after {start_s:.1f} s. Columns: the tokens that kvrouter predicts each replica to reuse, and the")
        say("  group that limits it; where the prompt goes; tokens predicted and really reused; ok: right for ALL")
        say("  replicas; full attention only: where a router that sees nothing else goes, and the hit it expects.\n")
        workers = "".join(f"{f'w{i}':<{CELL}}" for i in range(self._replicas))
        say(
            Text(f"{'#':>3} {'talk':>6} {'prompt':>6}  {workers}{'to':<6}{'predicted':>9} {'reused':>6} {'ok':<3} ")
            + Text("full attention only"),
            style="bold",
        )

    def row(self, row: Row) -> None:
        """One prompt."""
        line = Text(f"{row.number:>3} {f'{row.conversation}.{row.turn}':>6} {row.prompt_tokens:>6}  ")
        for i, hit in enumerate(row.predicted):
            limit = row.limited_by[i]
            cell = f"{hit}" + (f" {limit.split()[0]}" if limit else "")
            line.append(f"{cell:<{CELL}}", style="bold cyan" if i == row.chosen else "")
        by = f"w{row.chosen}" if row.by == "kvrouter" else f"w{row.chosen} rr"
        line.append(f"{by:<6}{row.promised:>9} {row.reused:>6} ")
        line.append(self._mark(row.exact), style="green" if row.exact else "bold red")
        i = row.full_attention_choice
        line.append(f"w{i} {row.full_attention[i]}")
        if row.full_attention_wrong:
            line.append(f", reuses {row.real[i]}: wrong replica, {max(row.real)} elsewhere", style="red")
        elif row.full_attention_overpromised:
            line.append(f", reuses {row.real[i]}", style="yellow")
        self._console.print(line)

    def _mark(self, good: bool) -> str:
        if self._console.encoding.startswith("utf"):
            return "✓   " if good else "✗   "
        return "yes " if good else "NO  "

    def closing(self, shape: str, rows: list[Row], summary: Summary) -> None:
        """What it came to, and what to run next."""
        say = self._console.print
        good = summary.exact_prompts == summary.prompts
        say("")
        say(
            Text(
                f"kvrouter: {summary.exact_prompts} of {summary.prompts} prompts predicted exactly, on every replica "
                f"({summary.exact_checked} of {summary.checked} predictions, {summary.nonzero_checked} of them hits)",
                style="bold green" if good else "bold red",
            )
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
        say("\nNext:")
        say("  kvrouter serve --worker w0=http://HOST:8000,events=tcp://HOST:5557,model=NAME    your own vLLM")
        say(f"  kvrouter sim --shape {shape}    one simulated replica to play with")
        say("  kvrouter demo --shape qwen3-next    the same with Mamba; also gpt-oss, llama")
