# SPDX-License-Identifier: Apache-2.0
"""Check for words of prose that read as riddles, in pages, docstrings, comments, help texts and messages.

    python .ci/prose.py [PATH...]

Prints `file:line: word: use X`. It skips code itself, quotations in backticks and blocks of code. It also reports a
line of a page that only looks like an item of a list, because GitHub and the documentation's site show such a line
differently.
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

# Each word, with its replacement. Case does not matter.
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

# A wrapped line may happen to begin like an item of a list: GitHub starts a list there, and mkdocs does not. Only the
# number 1 may interrupt a paragraph (CommonMark, "List items").
ITEM = re.compile(r"\s*(?:[-*+]|1[.)])\s")
IN_LIST = re.compile(r"\s*(?:[-*+]|\d+[.)])\s|\s|\Z")

# Words in quotations and in the targets of links are not checked.
QUOTED = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")
# These files are skipped: help texts of their metrics have such words, and users may have copied those texts.
METRICS = (
    "router/follow/discovery/discovery_metrics.py",
    "router/follow/streams/stream_metrics.py",
)
SUFFIXES = {".py", ".md", ".yml", ".yaml"}
NAMES = {"Makefile", "Dockerfile"}

Line = tuple[int, str]


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines of prose in a file, with their numbers."""
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
    """Yield the lines of comments, docstrings and all other strings with a space, because names of things have none."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def problems(path: Path, shown: str) -> Iterator[str]:
    """Yield `file:line: word: use X` for each forbidden word of a file."""
    for number, line in sorted(set(lines_of(path))):
        for match in PATTERN.finditer(QUOTED.sub("", line)):
            better = next(better for rule, better in RULES if rule.match(match[0]))
            yield f"{shown}:{number}: {match[0]}: use {better}"


def false_items(path: Path, shown: str) -> Iterator[str]:
    """Yield `file:line: ...` for each line of a paragraph that begins like an item of a list."""
    previous = ""
    for number, line in page_lines(path.read_text()):
        if ITEM.match(line) and not IN_LIST.match(previous):
            yield f"{shown}:{number}: begins like an item of a list: wrap the paragraph differently, or leave a line empty"
        previous = line


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if Path(name).suffix in SUFFIXES or Path(name).name in NAMES]
    return [name for name in names if not name.startswith(METRICS) and name != ".ci/prose.py"]


def main() -> int:
    names = sys.argv[1:] or tracked()
    files = [(ROOT / name, name) for name in names if (ROOT / name).is_file()]
    reports = [problem for path, name in files for problem in problems(path, name)]
    reports += [problem for path, name in files if path.suffix == ".md" for problem in false_items(path, name)]
    print("\n".join(reports))
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
