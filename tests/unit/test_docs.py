# SPDX-License-Identifier: Apache-2.0
"""The pages: every link leads somewhere, the map has every page, and the files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
FILE = re.compile(r"`((?:events|router|engine_patch|simulator|tests|benchmarks|deploy)/[\w./-]+\.\w+)`")
README_LINES_MAX = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_file_names_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    missing = [link for link, _ in LINK.findall(text) if "://" not in link and not (page.parent / link).exists()]
    missing += [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert not missing


def test_the_map_has_every_page() -> None:
    linked = {link for link, _ in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX
