# SPDX-License-Identifier: Apache-2.0
"""The blocks of code in the documentation's pages, and which of them a test runs.

A fence without a language, or with `sh` or `bash`, is a shell block. `<!-- not run: REASON -->` on the line before it
says why no test runs it; all other shell blocks run, in the world of their page (`doc_worlds.py`).

    python -m tests.support.doc_blocks      # how many there are of each, page by page
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
SHELLS = {"", "sh", "bash"}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
# pip needs a registry, or changes the tests' own environment. test_installation.py and test_distributions.py install
# the packages; extras come with that environment.
_INSTALL = re.compile(r"(?:\S+/)?pip3? (?:un)?install ")
INSTALLED = "tests/system/test_installation.py and test_distributions.py install the packages"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    # The reason why no test runs it; None if one does.
    not_run: str | None

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS

    @property
    def commands(self) -> list[str]:
        """The complete commands, in order, without comments and without installations."""
        return [command for command in whole_commands(self.text) if not _INSTALL.match(command)]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.strip().splitlines()[0][:80]}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    blocks = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()].rstrip().rpartition("\n")[2]
        mark = _MARK.fullmatch(before.strip())
        language = fence["info"].split(" ")[0]
        line = text.count("\n", 0, fence.start()) + 1
        block = Block(page, line, language, fence["text"], mark["reason"] if mark else None)
        if block.is_shell and block.not_run is None and not block.commands:
            block = replace(block, not_run=INSTALLED)
        blocks.append(block)
    return blocks


def all_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from blocks_of(page)


def stray_marks(page: str) -> int:
    """Count the `not run` marks of the page that stand before no block."""
    marks = len(_MARK.findall((ROOT / page).read_text()))
    return marks - sum(block.not_run not in (None, INSTALLED) for block in blocks_of(page))


def whole_commands(text: str) -> list[str]:
    """Split a shell text into commands, which may span lines by a trailing backslash or within quotes.

    Raises ValueError if quotes do not end.
    """
    commands, lines = [], []
    for line in text.splitlines():
        lines.append(line)
        so_far = "\n".join(lines)
        if line.endswith("\\") or not _is_whole(so_far):
            continue
        lines = []
        if shlex.split(so_far.replace("\\\n", " "), comments=True):
            commands.append(so_far)
    if lines:
        raise ValueError(f"quotes that do not end: {lines}")
    return commands


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return False
    return True


def counts(run_pages: set[str]) -> str:
    """Return a table with one row for each page that has shell blocks, and their sum.

    Args:
        run_pages: The pages whose blocks a test runs.
    """
    lines = [f"{'page':<40} {'run':>4} {'not':>4} {'unmarked':>9}"]
    sums = [0, 0, 0]
    for page in PAGES:
        shells = [block for block in blocks_of(page) if block.is_shell]
        marked = sum(block.not_run is not None for block in shells)
        run = len(shells) - marked if page in run_pages else 0
        row = [run, marked, len(shells) - run - marked]
        if shells:
            lines.append(f"{page:<40} {row[0]:>4} {row[1]:>4} {row[2]:>9}")
        sums = [sum(pair) for pair in zip(sums, row, strict=True)]
    return "\n".join([*lines, f"{'all':<40} {sums[0]:>4} {sums[1]:>4} {sums[2]:>9}"])


if __name__ == "__main__":
    from tests.support.doc_worlds import WORLDS

    print(counts(set(WORLDS)))
