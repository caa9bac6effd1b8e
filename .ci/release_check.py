# SPDX-License-Identifier: Apache-2.0
"""Check that the tag is the version of both distributions, and that CHANGELOG.md has a section with text for it.

    python .ci/release_check.py vX.Y.Z [--notes]

With --notes it prints that section. It uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The router's and the engine patch's.
PYPROJECTS = ("pyproject.toml", "engine_patch/pyproject.toml")


def notes(tag: str, pyprojects: Mapping[str, str], changelog: str) -> str:
    """Return the changelog's section for the tag's version.

    Args:
        tag: The tag, as `v1.2.3`.
        pyprojects: The text of each distribution's pyproject.toml, by its path.
        changelog: The text of the changelog.

    Raises:
        ValueError: If the tag or a file is wrong; the message says how to fix it.
    """
    version = tag.removeprefix("v")
    for name, text in pyprojects.items():
        stated = tomllib.loads(text)["project"]["version"]
        if tag != f"v{stated}":
            raise ValueError(f"the tag is {tag} and {name} says {stated}: change one of them")
    sections = re.split(r"^## +", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, text = section.partition("\n")
        if re.fullmatch(rf"{re.escape(version)}( .*)?", title) and text.strip():
            return text.strip() + "\n"
    raise ValueError(
        f"CHANGELOG.md has no section `## {version}` with text: rename `## Unreleased`, with the date behind it"
    )


def main() -> int:
    try:
        texts = {name: (ROOT / name).read_text() for name in PYPROJECTS}
        section = notes(sys.argv[1], texts, (ROOT / "CHANGELOG.md").read_text())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--notes" in sys.argv:
        print(section, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
