# SPDX-License-Identifier: Apache-2.0
"""Table of values in the chart's README.md, made from values.yaml and its `# --` lines (`make chart-readme`).

With --check nothing is written, and the exit code is 1 if the README's table does not match values.yaml.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "deploy" / "helm" / "kvrouter"
HEAD = "## Values\n"
KEY = re.compile(r"( *)([A-Za-z]+):")


def described(text: str) -> dict[str, str]:
    """Return the text of each `# --` line by the path of the value below it."""
    texts: dict[str, str] = {}
    path: list[str] = []
    waiting: str | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("# -- "):
            waiting = line.lstrip().removeprefix("# -- ")
        elif match := KEY.match(line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if waiting is not None:
                texts[".".join(path)] = waiting
            waiting = None
    return texts


def leaves(values: dict[str, Any], known: dict[str, str], above: str = "") -> dict[str, Any]:
    """Return the values by path: each one with a description, and each scalar or empty map outside them."""
    leaf_values: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and path not in known:
            leaf_values |= leaves(value, known, f"{path}.")
        else:
            leaf_values[path] = value
    return leaf_values


def table(text: str) -> str:
    descriptions = described(text)
    defaults = leaves(yaml.safe_load(text), descriptions)
    if missing := sorted(defaults.keys() ^ descriptions.keys()):
        raise SystemExit(f"values.yaml: no value, or no `# --` line above it: {', '.join(missing)}")
    rows = [f"| `{path}` | `{json.dumps(value)}` | {descriptions[path]} |" for path, value in defaults.items()]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows, ""])


def main() -> int:
    readme = CHART / "README.md"
    current = readme.read_text()
    expected = current.partition(HEAD)[0] + f"{HEAD}\n" + table((CHART / "values.yaml").read_text())
    if "--check" in sys.argv:
        if current != expected:
            print("deploy/helm/kvrouter/README.md is not what values.yaml says: make chart-readme", file=sys.stderr)
        return int(current != expected)
    readme.write_text(expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
