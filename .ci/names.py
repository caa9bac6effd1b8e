# SPDX-License-Identifier: Apache-2.0
"""Check for names in prose that do not exist: classes, functions and files in docstrings, comments and pages.

    python .ci/names.py [PATH...]

Prints `file:line: name: why`. A class is a word with a capital inside (`HitFinder`) or the word after "Raises", a
function is a name in backticks that ends with `()` or contains an underscore, and a file is a name with the suffix of
source code. Classes and functions are looked up among all names that the repository's code uses, and files by the end
of their paths, so `index/store/keys.py` may be written as `keys.py`. Names of other projects stand in
`foreign_names.txt`, below their project. The changelog and the decision records may name things that no longer exist.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from prose import page_lines

ROOT = Path(__file__).resolve().parents[1]
FOREIGN_NAMES = Path(__file__).with_name("foreign_names.txt")
PROSE = {".py", ".pyx", ".pxd", ".md"}
CODE = {".py", ".pyx", ".pxd", ".h", ".js", ".go", ".toml", ".yaml", ".yml", ".html", ".json", ""}
RECORDS = ("CHANGELOG.md", "docs/adr/")
# Results of benchmarks are data and not code, so a name there proves nothing.
DATA = "/results/"

CLASS = re.compile(r"(?<![\w./$-])_?[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+(?![\w/-])")
RAISED = re.compile(r"\bRaises:? ([A-Z]\w+)")
FUNCTION = re.compile(r"`(?:[a-z_]\w*\.)*([a-z_]\w*)\(\)`|`(_?[a-z0-9]+(?:_[a-z0-9]+)+)`")
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`")
FILE = re.compile(r"(?<![\w/.*<{-])(\w[\w./-]*\.(?:pyx?|pxd|js|h))(?![\w-]|\.\w)")
ADDRESS = re.compile(r"https?://\S+|\]\([^)\n]*\)")
WORD = re.compile(r"\w+")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def names_in_code(paths: Iterable[Path]) -> set[str]:
    """Return every name in code, with the words of strings that have no spaces: those name fields and settings."""
    names: set[str] = set()
    for path in paths:
        text = path.read_text()
        if path.suffix != ".py":
            names.update(WORD.findall(text))
            continue
        names.add(path.stem)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                names.add(token.string)
            elif token.type == tokenize.STRING and " " not in token.string:
                names.update(WORD.findall(token.string))
    return names


def prose_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside blocks of code, or those of a module's comments and docstrings, by number."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from page_lines(text)
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield from enumerate(node.value.value.splitlines(), node.lineno)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            _, mark, comment = line.partition("#")
            if mark:
                yield number, comment


def mentioned_names(line: str) -> set[str]:
    members = {name for member in MEMBER.findall(line) for name in member}
    functions = {name for function in FUNCTION.findall(line) for name in function if name}
    return {*CLASS.findall(line), *RAISED.findall(line), *functions, *members}


def is_known(name: str, names: set[str]) -> bool:
    """Return whether code has the name, or its singular, or the counter that Prometheus shows with `_total`."""
    metric = name.removeprefix("kvrouter_")
    return not names.isdisjoint({name, name.removesuffix("s"), metric, metric.removesuffix("_total")})


def main() -> int:
    listed = tracked_files()
    names = names_in_code(ROOT / name for name in listed if Path(name).suffix in CODE and DATA not in name)
    endings = {Path(name).parts[at:] for name in listed for at in range(len(Path(name).parts))}
    for line in FOREIGN_NAMES.read_text().splitlines():
        foreign = line.partition("#")[0].strip()
        names.add(foreign)
        endings.add(Path(foreign).parts)
    prose = [
        name for name in listed if Path(name).suffix in PROSE and not name.startswith(RECORDS) and DATA not in name
    ]
    problems = []
    for name in sys.argv[1:] or prose:
        for number, line in prose_lines(ROOT / name):
            text = ADDRESS.sub("", line)
            unknown = [word for word in sorted(mentioned_names(text)) if not is_known(word, names)]
            problems += [f"{name}:{number}: {word}: no code has this name" for word in unknown]
            missing = [file for file in FILE.findall(text) if Path(file).parts not in endings]
            problems += [f"{name}:{number}: {file}: no such file" for file in missing]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
