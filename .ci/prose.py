# SPDX-License-Identifier: Apache-2.0
"""Fails on words of prose that read as riddles: in pages, docstrings, comments, help texts and messages.

    python .ci/prose.py [PATH...]

Prints `file:line: word: use X`. It skips code itself, quotations in backticks and blocks of code. A line of a page that
only looks like an item of a list fails too: GitHub and the documentation's site show it differently.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Word -> what to write. Case does not matter.
WORDS = {
    r"told": "reported, sent, known, or the active voice",
    r"tells": "says, shows, reports",
    r"asked": "queried, requested, called, or the active voice",
    r"anew": "again",
    r"as it (?:was|were)": "unchanged, as before",
    r"(?:is|are|was) had": "has, exists",
    r"any ?more": "no longer",
    r"by chance": "at random, accidentally",
    r"apart by": "separated by",
    r"a part in": "an effect on",
    r"so many": "N, the number of",
    r"as (?:ever|long since)": "as before",
    r"whereof|whereby|wherein|hereof|therein|thereof|withal|ere|nought|naught": "a plain word",
    r"in vain": "without success",
    r"at hand": "available",
    r"of now": "current",
    r"ceased?": "stop, stopped",
    r"gone on with": "continued",
    r"(?:is|are|was|were) gone on": "continues",
    r"knows nothing of": "does not depend on, does not know",
    r"nobody's": "unowned",
    r"what is not said": "name what is missing",
    r"anyone may": "you can",
    r"is dear": "is expensive",
    r"are dear": "are expensive",
    r"seldom": "rarely",
    r"bothered": "disturbed, queried",
    r"otherwise than": "differently from",
    r"as far as told": "as far as reported",
    r"has no room for": "does not fit",
}
PATTERN = re.compile(r"\b(?:" + "|".join(f"(?:{word})" for word in WORDS) + r")\b", re.IGNORECASE)
RULES = [(re.compile(rf"\A(?:{word})\Z", re.IGNORECASE), better) for word, better in WORDS.items()]

# A wrapped line that happens to begin like an item: GitHub starts a list there, mkdocs does not. Only the number 1
# may interrupt a paragraph (CommonMark, "List items").
ITEM = re.compile(r"\s*(?:[-*+]|1[.)])\s")
IN_LIST = re.compile(r"\s*(?:[-*+]|\d+[.)])\s|\s|\Z")

# Quotations and the targets of links have their own words.
QUOTED = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")
# Where the help text of a metric, which users may have copied, has such a word.
METRICS = (
    "router/follow/discovery/discovery_metrics.py",
    "router/follow/streams/stream_metrics.py",
)
SUFFIXES = {".py", ".md", ".yml", ".yaml"}
NAMES = {"Makefile", "Dockerfile"}

Line = tuple[int, str]


def lines_of(path: Path) -> Iterator[Line]:
    """The prose of a file, line by line."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from page_lines(text)
    elif path.suffix == ".py":
        yield from python_lines(text)
    else:
        yield from enumerate(text.splitlines(), 1)


def page_lines(text: str) -> Iterator[Line]:
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def python_lines(text: str) -> Iterator[Line]:
    """Comments, docstrings, and every other text that has a space: names of things have none."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def problems(path: Path, shown: str) -> Iterator[str]:
    """`file:line: word: use X` for each word that is not to be used."""
    for number, line in sorted(set(lines_of(path))):
        for found in PATTERN.finditer(QUOTED.sub("", line)):
            better = next(better for rule, better in RULES if rule.match(found[0]))
            yield f"{shown}:{number}: {found[0]}: use {better}"


def false_items(path: Path, shown: str) -> Iterator[str]:
    """`file:line: ...` for each line that begins like an item of a list right below a line of a paragraph."""
    before = ""
    for number, line in page_lines(path.read_text()):
        if ITEM.match(line) and not IN_LIST.match(before):
            yield f"{shown}:{number}: begins like an item of a list: wrap the paragraph differently, or leave a line empty"
        before = line


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if Path(name).suffix in SUFFIXES or Path(name).name in NAMES]
    return [name for name in names if not name.startswith(METRICS) and name != ".ci/prose.py"]


def main() -> int:
    names = sys.argv[1:] or tracked()
    files = [(ROOT / name, name) for name in names if (ROOT / name).is_file()]
    found = [problem for path, name in files for problem in problems(path, name)]
    found += [problem for path, name in files if path.suffix == ".md" for problem in false_items(path, name)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
