# SPDX-License-Identifier: Apache-2.0
"""How to install what an optional feature needs, with a command that works wherever the package came from."""

from __future__ import annotations

import re
from importlib.metadata import requires

from kvrouter.router.base.common.version import PACKAGE

REQUIREMENT = re.compile(r"""(?P<need>[^;]+?)\s*;\s*extra\s*==\s*["'](?P<extra>[^"']+)["']\s*""")


def install_command(extra: str) -> str:
    """`pip install` of the packages of an extra. ValueError where there is no such extra."""
    matches = (REQUIREMENT.fullmatch(line) for line in requires(PACKAGE) or ())
    needs = [match["need"] for match in matches if match is not None and match["extra"] == extra]
    if not needs:
        raise ValueError(f"{PACKAGE} has no extra {extra!r}")
    return "pip install " + " ".join(f"'{need}'" for need in needs)
