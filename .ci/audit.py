# SPDX-License-Identifier: Apache-2.0
"""Check of the installed packages for known vulnerabilities, with pip-audit (`make audit`).

The exit code is 0 if no vulnerability is known, 1 if some are, and 2 if pip-audit gave no answer. pip-audit itself ends
with 0 if its database answers nothing for any package, which looks like a clean result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

UNTOLD = 2
# The database does not know our own packages.
OWN = {"hybrid-kv-router", "hybrid-kv-engine-patch"}
TIMEOUT_S = 600


def verdict(report: dict[str, Any]) -> tuple[int, str]:
    """Return the exit code and the text for pip-audit's JSON report."""
    packages = [package for package in report.get("dependencies", []) if package["name"] not in OWN]
    audited = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"{package['name']} {package['version']}: {entry['id']}, fixed in {', '.join(entry['fix_versions']) or 'no version'}"
        for package in audited
        for entry in package["vulns"]
    ]
    if not audited:
        return UNTOLD, (
            "not audited: the database of vulnerabilities cannot be reached, or knows none of the packages; "
            "run it where the package index of the Python project is reachable"
        )
    skipped = sorted(package["name"] for package in packages if "skip_reason" in package)
    if skipped:
        lines.append(f"not audited, as the database does not know them: {', '.join(skipped)}")
    vulnerable = any(package["vulns"] for package in audited)
    lines.append(f"{len(audited)} packages audited, {'with' if vulnerable else 'without'} known vulnerabilities")
    return (1 if vulnerable else UNTOLD if skipped else 0), "\n".join(lines)


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--local", "--progress-spinner", "off", "--format", "json"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        report = json.loads(completed.stdout)
    except (ValueError, subprocess.TimeoutExpired) as error:
        last_lines = completed.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [str(error)]
        print(
            f"not audited: pip-audit gave no report ({' '.join(last_lines)}); is its database reachable?",
            file=sys.stderr,
        )
        return UNTOLD
    code, text = verdict(report)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
