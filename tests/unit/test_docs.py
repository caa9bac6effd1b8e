# SPDX-License-Identifier: Apache-2.0
"""Checks of the pages: links lead somewhere, the map has every page, and named files and pages exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import PAGES as BLOCK_PAGES
from tests.support.doc_blocks import all_blocks, counts, stray_marks
from tests.support.doc_worlds import WORLDS

ROOT = Path(__file__).resolve().parents[2]
# Every package and every wing of the router, except these, has a page that says which file to open.
NO_README = {ROOT / "router", ROOT / "router" / "cli"}
CODE_FOLDERS = {path.parent for path in [*ROOT.glob("*/__init__.py"), *ROOT.glob("router/*/__init__.py")]}
READMES = sorted(folder / "README.md" for folder in CODE_FOLDERS - NO_README)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *READMES])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(
    r"`((?:client|events|router|engine_patch|simulator|replay|shadow|tests|benchmarks|deploy)/[\w./-]+\.\w+)`"
)
MENTION = re.compile(r"\bdocs/[\w/-]+\.md\b")
# Each page has one job, and its folder says which.
KINDS = {"tutorials", "how-to", "reference", "explanation", "adr"}
README_LINES_MAX = 120
REASON_WORDS_MAX = 16


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub makes them, and those that it sets itself."""
    text = page.read_text()
    headings = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}
    return headings | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_file_names_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    for link, anchor in LINK.findall(text):
        target = page.parent / link if link else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            missing.append(f"{link}#{anchor}")
    assert not missing


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_a_readme_of_code_names_files_that_exist(page: Path) -> None:
    names = re.findall(r"`((?:\.\./)*\w+(?:/[\w/.]*|\.(?:py|pyx|h)))`", page.read_text())
    seen_from = (page.parent, ROOT, ROOT / "router")
    listed = {path.name for path in page.parent.rglob("*")}
    missing = [name for name in names if name not in listed and not any((base / name).exists() for base in seen_from)]
    assert names and not missing


def test_the_map_has_every_page() -> None:
    docs = ROOT / "docs"
    linked = {(docs / link).resolve() for link, _ in LINK.findall((docs / "README.md").read_text())}
    pages = {page for page in docs.rglob("*.md") if page.parent.name != "adr"}
    assert pages - {docs / "README.md"} <= linked


# Files without a suffix that may mention pages.
UNSUFFIXED = {"Makefile", "Dockerfile"}


def test_every_folder_of_pages_is_a_kind() -> None:
    assert {path.name for path in (ROOT / "docs").iterdir() if path.is_dir()} <= KINDS | {"images"}


def test_pages_that_the_repository_mentions_exist() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "build"))]
    paths = [path for path in ROOT.iterdir() if path.is_file()] + [
        nested for path in folders for nested in path.rglob("*")
    ]
    missing = set()
    for path in paths:
        if path.is_file() and (path.suffix in {".py", ".md", ".yml", ".yaml", ".toml"} or path.name in UNSUFFIXED):
            missing |= {(path.name, page) for page in MENTION.findall(path.read_text()) if not (ROOT / page).exists()}
    assert len(paths) > 100
    assert not missing


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum(not line.startswith("<!--") for line in lines) <= README_LINES_MAX


def test_every_shell_block_is_run_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Print how many blocks are run and how many are not; tests/system/test_docs_run.py runs them."""
    shells = [block for block in all_blocks() if block.is_shell]
    unmarked = [str(block) for block in shells if block.not_run is None and block.page not in WORLDS]
    with capsys.disabled():
        print(f"\n{counts(set(WORLDS))}")
    assert not unmarked, (
        "neither run nor marked. Write `<!-- not run: REASON -->` on the line before the block, or give its page a "
        "world in tests/support/doc_worlds.py; a block that is no shell has a language (```text)\n"
        + "\n".join(unmarked)
    )


def test_reasons_for_not_running_are_short_and_name_what_exists() -> None:
    for block in all_blocks():
        if block.not_run is None:
            continue
        assert block.is_shell, f"{block}: only shell blocks are run"
        assert 2 <= len(block.not_run.split()) <= REASON_WORDS_MAX, f"{block}: {block.not_run}"
        for name in re.findall(r"tests/[\w./-]+", block.not_run):
            assert (ROOT / name).exists(), f"{block}: no {name}"
    stray = [page for page in BLOCK_PAGES if stray_marks(page)]
    assert not stray, f"a mark before no block: {stray}"


def test_the_sites_nav_has_every_page() -> None:
    nav = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    # The index of decisions lists them, and not the nav.
    decisions = {page for page in pages if re.match(r"adr/\d", page)}
    assert sorted(nav) == sorted(pages - decisions), "add the page to `nav` in mkdocs.yml"
    index = (docs / "adr" / "README.md").read_text()
    assert not [page for page in decisions if f"]({Path(page).name})" not in index], "docs/adr/README.md lacks it"


# Flags of vLLM that a page names beside the router's flags.
OF_ENGINES = {"--block-size"}


FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
BENCHMARKS = (ROOT / "docs/reference/benchmarks.md").read_text()


def rows_below(page: str, column: str) -> list[list[str]]:
    """Return the rows of each table with the column `column`, as cells and without the table's head."""
    rows: list[list[str]] = []
    is_wanted = False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or column in cells:
            is_wanted = column in cells
        elif is_wanted and not cells[0].startswith("---"):
            rows.append(cells)
    return rows


def section(anchor: str) -> str:
    """Return the text of a section of the benchmarks page, with its subsections."""
    heads = [
        (heading, re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-"))
        for heading in HEADS.finditer(BENCHMARKS)
    ]
    (number,) = (number for number, (_, name) in enumerate(heads) if name == anchor)
    first = heads[number][0]
    ends = [heading.start() for heading, _ in heads[number + 1 :] if len(heading[1]) <= len(first[1])]
    return BENCHMARKS[first.start() : ends[0] if ends else None]


HEADS = re.compile(r"^(#+) (.+)$", re.MULTILINE)


@pytest.mark.parametrize("column", ["measured", "measured, us at the median"])
def test_figures_for_sizing_stand_in_the_section_that_they_name(column: str) -> None:
    text = ""
    rows = rows_below("how-to/sizing.md", column)
    assert len(rows) >= 4
    for _, measured, where, *_ in rows:
        if link := re.search(r"benchmarks\.md#([\w-]+)", where):
            text = section(link[1])
        figures = FIGURE.findall(measured)
        published = set(FIGURE.findall(text))
        assert all(figure in published for figure in figures), (measured, where)


def test_figures_of_the_comparison_stand_in_one_row_of_the_benchmarks() -> None:
    rows = rows_below("explanation/comparison.md", "ratio")
    assert len(rows) > 10
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in BENCHMARKS.splitlines()]
    for what, ours, theirs, which, ratio in rows:
        quoted = [ours, theirs, which.replace("`", ""), ratio.strip("*")]
        assert any(cells[2:6] == quoted for cells in lines), (what, quoted)


def test_figures_of_the_benchmarks_stand_in_the_tables_that_commands_write() -> None:
    written = [
        {cell.strip() for cell in line.strip("|").split("|")}
        for line in (ROOT / "benchmarks/results/tables.md").read_text().splitlines()
        if line.startswith("|")
    ]
    rows = rows_below("reference/benchmarks.md", "kvrouter")
    assert len(rows) > 20
    for row in rows:
        # Cells 1 to 5: unit, this router's figure, the peer's, the peer, the ratio.
        assert any(set(row[1:6]) <= cells for cells in written), row
    figures = {figure for cells in written for cell in cells for figure in FIGURE.findall(cell)}
    for anchor in ("scale", "in-process"):
        cells = [cell for line in section(anchor).splitlines() if line.startswith("|") for cell in line.split("|")[2:]]
        assert len(cells) > 10
        assert {figure for cell in cells for figure in FIGURE.findall(cell)} <= figures, anchor


def test_troubleshooting_leads_to_every_code_of_the_doctor() -> None:
    codes = re.findall(r"</a>(KV\d+) ", (ROOT / "docs/how-to/doctor.md").read_text())
    text = (ROOT / "docs/how-to/troubleshooting.md").read_text()
    assert len(codes) > 40
    assert not [code for code in codes if f"[{code}](doctor.md#{code.lower()})" not in text], "add it to the page"


def test_flags_that_the_docs_name_for_other_programs_exist() -> None:
    reference = (ROOT / "docs/reference/settings.md").read_text() + (ROOT / "docs/reference/cli.md").read_text()
    rows = re.findall(r"^\| `[^|]+ \| ([^|]+) \|$", (ROOT / "docs/how-to/migration.md").read_text(), re.MULTILINE)
    flags = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]+", row)}
    assert len(flags) > 15
    # A cell may also name a flag of the engine.
    assert not [
        flag
        for flag in flags
        if f"`{flag} " not in reference and f"`{flag}`" not in reference and flag not in OF_ENGINES
    ]
