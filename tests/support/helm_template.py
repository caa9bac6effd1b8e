# SPDX-License-Identifier: Apache-2.0
"""`helm template` without the helm binary: Helm's own Go engine, from the package helm-python-sdk.

python -m tests.support.helm_template CHART [VALUES.yaml ...] prints the manifests. It runs in a process of its own: the
engine's runtime stays out of the process that asks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

RELEASE = "kvrouter"
NAMESPACE = "serving"
# Helm's: 0 unknown, 1 info, 2 warning, 3 error. The icon that a chart should have is all it says of one without fault.
WARNING = 2


class HelmError(AssertionError):
    """The chart does not render with these values, or its schema refuses them."""


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm lays one file of values over another: maps are merged, all else is replaced."""
    both = {
        name: merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in over.items()
    }
    return base | both


def helm_template(chart: Path, values: dict[str, Any], release: str = RELEASE) -> list[dict[str, Any]]:
    """The objects that Helm makes of the chart, in the order of its files; HelmError names why there are none."""
    asked = json.dumps({"chart": str(chart), "values": values, "release": release})
    done = subprocess.run([sys.executable, __file__], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise HelmError(done.stderr.strip().splitlines()[-1])
    files: dict[str, str] = json.loads(done.stdout)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def answer() -> int:
    import helm_python as helm

    asked = json.load(sys.stdin)
    with helm.Chart.load(asked["chart"]) as chart:
        chart.validate_schema(asked["values"])
        report = helm.lint(asked["chart"], asked["values"], strict=True, namespace=NAMESPACE)
        bad = [found for found in report["messages"] if found["severity"] >= WARNING]
        if bad:
            print(bad, file=sys.stderr)
            return 1
        files = chart.render(asked["values"], name=asked["release"], namespace=NAMESPACE)
    json.dump(files, sys.stdout)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(answer())
    given: dict[str, Any] = {}
    for name in sys.argv[2:]:
        given = merged(given, yaml.safe_load(Path(name).read_text()))
    print(yaml.safe_dump_all(helm_template(Path(sys.argv[1]), given), sort_keys=False))
