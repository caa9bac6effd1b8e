# SPDX-License-Identifier: Apache-2.0
"""`helm template` without the helm binary: Helm's own Go engine, from the package helm-python-sdk.

    python -m tests.support.helm_template CHART [VALUES.yaml ...]    # prints the manifests

The engine runs in its own process, so that Go's runtime is not loaded into the process of the tests.
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
# Helm's severities: 0 unknown, 1 info, 2 warning, 3 error. For a chart without faults it only suggests an icon (info).
WARNING = 2


class HelmError(AssertionError):
    """A failure to render the chart with these values, or a refusal of the values by its schema."""


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge two files of values as Helm does: maps are merged, all other values are replaced."""
    both = {
        name: merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in over.items()
    }
    return base | both


def helm_template(chart: Path, values: dict[str, Any], release: str = RELEASE) -> list[dict[str, Any]]:
    """Render the chart and return its objects, in the order of the chart's files.

    Raises HelmError with Helm's message if it does not render.
    """
    request = json.dumps({"chart": str(chart), "values": values, "release": release})
    process = subprocess.run([sys.executable, __file__], input=request, capture_output=True, text=True)
    if process.returncode:
        raise HelmError(process.stderr.strip().splitlines()[-1])
    files: dict[str, str] = json.loads(process.stdout)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def answer() -> int:
    import helm_python as helm

    request = json.load(sys.stdin)
    with helm.Chart.load(request["chart"]) as chart:
        chart.validate_schema(request["values"])
        report = helm.lint(request["chart"], request["values"], strict=True, namespace=NAMESPACE)
        bad = [message for message in report["messages"] if message["severity"] >= WARNING]
        if bad:
            print(bad, file=sys.stderr)
            return 1
        files = chart.render(request["values"], name=request["release"], namespace=NAMESPACE)
    json.dump(files, sys.stdout)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(answer())
    given: dict[str, Any] = {}
    for name in sys.argv[2:]:
        given = merged(given, yaml.safe_load(Path(name).read_text()))
    print(yaml.safe_dump_all(helm_template(Path(sys.argv[1]), given), sort_keys=False))
