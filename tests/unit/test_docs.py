# SPDX-License-Identifier: Apache-2.0
"""The pages: every link leads somewhere, the map has every page, and the files and pages that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(r"`((?:client|events|router|engine_patch|simulator|replay|tests|benchmarks|deploy)/[\w./-]+\.\w+)`")
MENTION = re.compile(r"\bdocs/[\w/-]+\.md\b")
# One job a page, and the folder says which.
KINDS = {"tutorials", "how-to", "reference", "explanation", "adr"}
README_LINES_MAX = 120


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_file_names_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    for link, anchor in LINK.findall(text):
        target = page.parent / link if link else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            missing.append(f"{link}#{anchor}")
    assert not missing


def test_the_map_has_every_page() -> None:
    docs = ROOT / "docs"
    linked = {(docs / link).resolve() for link, _ in LINK.findall((docs / "README.md").read_text())}
    pages = {page for page in docs.rglob("*.md") if page.parent.name != "adr"}
    assert pages - {docs / "README.md"} <= linked


# Those without a suffix that may mention pages.
UNSUFFIXED = {"Makefile", "Dockerfile"}


def test_every_folder_of_pages_is_a_kind() -> None:
    assert {path.name for path in (ROOT / "docs").iterdir() if path.is_dir()} <= KINDS | {"images"}


def test_pages_that_the_repository_mentions_exist() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "build"))]
    paths = [path for path in ROOT.iterdir() if path.is_file()] + [
        found for path in folders for found in path.rglob("*")
    ]
    missing = set()
    for path in paths:
        if path.is_file() and (path.suffix in {".py", ".md", ".yml", ".yaml", ".toml"} or path.name in UNSUFFIXED):
            missing |= {(path.name, page) for page in MENTION.findall(path.read_text()) if not (ROOT / page).exists()}
    assert len(paths) > 100
    assert not missing


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX
