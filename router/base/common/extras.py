# SPDX-License-Identifier: Apache-2.0
"""The command that installs the packages of an optional feature, wherever this package came from."""

from __future__ import annotations

import re
from importlib.metadata import requires

from kvrouter.router.base.common.version import PACKAGE

REQUIREMENT = re.compile(r"""(?P<need>[^;]+?)\s*;\s*extra\s*==\s*["'](?P<extra>[^"']+)["']\s*""")


def install_command(extra: str) -> str:
    """Return the `pip install` command for the packages of an extra. Raises ValueError if there is no such extra."""
    matches = (REQUIREMENT.fullmatch(line) for line in requires(PACKAGE) or ())
    needs = [match["need"] for match in matches if match is not None and match["extra"] == extra]
    if not needs:
        raise ValueError(f"{PACKAGE} has no extra {extra!r}")
    return "pip install " + " ".join(f"'{need}'" for need in needs)
