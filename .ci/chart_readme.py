# SPDX-License-Identifier: Apache-2.0
"""`make chart-readme`: the table of values in the chart's README.md, made of values.yaml and its `# --` lines.

With --check nothing is written; exit code 1: the table is not that of values.yaml.
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
    """What the `# --` line above a value says of it, by the value's path."""
    found: dict[str, str] = {}
    path: list[str] = []
    waiting: str | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("# -- "):
            waiting = line.lstrip().removeprefix("# -- ")
        elif match := KEY.match(line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if waiting is not None:
                found[".".join(path)] = waiting
            waiting = None
    return found


def leaves(values: dict[str, Any], known: dict[str, str], above: str = "") -> dict[str, Any]:
    """The values that have a description, and those without whose parents have none either."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and path not in known:
            found |= leaves(value, known, f"{path}.")
        else:
            found[path] = value
    return found


def table(text: str) -> str:
    known = described(text)
    defaults = leaves(yaml.safe_load(text), known)
    if missing := sorted(defaults.keys() ^ known.keys()):
        raise SystemExit(f"values.yaml: no value, or no `# --` line above it: {', '.join(missing)}")
    rows = [f"| `{path}` | `{json.dumps(value)}` | {known[path]} |" for path, value in defaults.items()]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows, ""])


def main() -> int:
    readme = CHART / "README.md"
    now = readme.read_text()
    wanted = now.partition(HEAD)[0] + f"{HEAD}\n" + table((CHART / "values.yaml").read_text())
    if "--check" in sys.argv:
        if now != wanted:
            print("deploy/helm/kvrouter/README.md is not what values.yaml says: make chart-readme", file=sys.stderr)
        return int(now != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
