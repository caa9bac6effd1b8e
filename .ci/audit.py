# SPDX-License-Identifier: Apache-2.0
"""`make audit`: known vulnerabilities of the installed packages, by pip-audit. Exit code 0: none, 1: some, 2: unknown.

pip-audit itself ends with 0 when its database answers nothing for any package, which reads like a clean bill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

UNTOLD = 2
# Our own package, which no database knows.
OWN = "hybrid-kv-router"
TIMEOUT_S = 600


def verdict(report: dict[str, Any]) -> tuple[int, str]:
    """Exit code and text for pip-audit's JSON report."""
    packages = [package for package in report.get("dependencies", []) if package["name"] != OWN]
    audited = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in audited
        for found in package["vulns"]
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        report = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired) as error:
        said = done.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [str(error)]
        print(f"not audited: pip-audit gave no report ({' '.join(said)}); is its database reachable?", file=sys.stderr)
        return UNTOLD
    code, text = verdict(report)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
