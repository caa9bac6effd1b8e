# SPDX-License-Identifier: Apache-2.0
"""`release_check.py vX.Y.Z`: the tag is pyproject.toml's version, and CHANGELOG.md has a section of it with text.

With --notes that section is printed. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, pyproject: str, changelog: str) -> str:
    """The changelog's section of that version. ValueError: what is wrong, and what mends it."""
    version = tomllib.loads(pyproject)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag} and pyproject.toml says {version}: change one of them")
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
        found = notes(sys.argv[1], (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--notes" in sys.argv:
        print(found, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
