# SPDX-License-Identifier: Apache-2.0
"""Check that the tag is the version in pyproject.toml, and that CHANGELOG.md has a section with text for it.

    python .ci/release_check.py vX.Y.Z [--notes]

With --notes it prints that section. It uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, pyproject: str, changelog: str) -> str:
    """Return the changelog's section for the tag's version.

    Raises:
        ValueError: If the tag or the changelog is wrong; the message says how to fix it.
    """
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
        section = notes(sys.argv[1], (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--notes" in sys.argv:
        print(section, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
