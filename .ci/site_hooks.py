# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation's build (mkdocs.yml).

Pages link to files of the repository outside docs/, so the hooks copy these files into the site, under `source/`. A
link whose text is the file name of a page gets the page's title instead. The site also has llms.txt, a map of its pages
for language models, and each page as Markdown beside its HTML.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCE = "source"
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")
# A link whose text is the name of a page's file, which reads well on GitHub alone.
_NAMED = re.compile(r"\[[\w/-]+\.md\]\((?P<path>[^)#\s:]+\.md)(?P<anchor>#[\w-]+)?\)")
# Tests read the text after the language of a block, as in "```json example=events".
_INFO = re.compile(r"^(?P<fence> *```\w+) [^\n`]*$", re.MULTILINE)
# A row of the map in docs/README.md: the pages, and the purpose of each.
_ROW = re.compile(r"^\| (?P<pages>\[.+?) \| (?P<text>.+) \|$", re.MULTILINE)
_PAGE = re.compile(r"\]\((?P<path>[\w/.-]+\.md)\)")


def outside(page: str, link: str) -> Path | None:
    """Return the repository file outside docs/ that a page links to, or None for any other link."""
    target = (DOCS / page).parent.joinpath(link).resolve()
    inside = target.is_relative_to(DOCS) or not target.is_relative_to(ROOT)
    return None if inside or not target.is_file() else target


def site_path(target: Path) -> str:
    """Return the path of a repository file within the site.

    A Markdown file gets the suffix `.txt`, because it would otherwise become a page with links of its own.
    """
    name = str(target.relative_to(ROOT))
    return f"{SOURCE}/{name}.txt" if target.suffix == ".md" else f"{SOURCE}/{name}"


def on_files(files: Any, config: Any) -> Any:
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).as_posix()
        for link in _LINK.finditer(path.read_text()):
            target = outside(page, link["path"])
            if target is not None and files.get_file_from_path(site_path(target)) is None:
                files.append(File.generated(config, site_path(target), content=target.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        target = outside(source, found["path"])
        if target is None:
            return found["path"]
        return posixpath.relpath(site_path(target), posixpath.dirname(source) or ".")

    def titled(found: re.Match[str]) -> str:
        target = (DOCS / source).parent / found["path"]
        if outside(source, found["path"]) is not None or not target.is_file():
            return found[0]
        return f"[{title_of(target)}]({found['path']}{found['anchor'] or ''})"

    return _INFO.sub(r"\g<fence>", _LINK.sub(moved, _NAMED.sub(titled, markdown)))


def title_of(page: Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    for path in DOCS.rglob("*.md"):
        copy = site / path.relative_to(DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (site / "llms.txt").write_text(llms_text(config.site_name, config.site_description, config.nav))


def llms_text(name: str, summary: str, nav: list[dict[str, Any]]) -> str:
    """Return llms.txt: a section for each section of the nav, with links to its pages and the map's texts on them."""
    about = {}
    for row in _ROW.finditer((DOCS / "README.md").read_text()):
        about.update({link["path"]: row["text"] for link in _PAGE.finditer(row["pages"])})
    lines = [f"# {name}", "", f"> {summary}", ""]
    for section in nav:
        for title, pages in section.items():
            lines += [f"## {title}", ""]
            for page in [pages] if isinstance(pages, str) else pages:
                text = f": {about[page]}" if page in about else ""
                lines.append(f"- [{title_of(DOCS / page)}]({page}){_without_links(text)}")
            lines.append("")
    return "\n".join(lines)


def _without_links(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
