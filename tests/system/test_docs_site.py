# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: built without a warning, and read in a real browser, light, dark and as on a phone."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser_page import BrowserPage
from tests.support.quiet_server import QuietServer

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 400.0
# Elements whose `src` or `href` a browser fetches when it shows a page.
FETCHED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
PHONE, DESK = 360, 1280
# Pages with something wide: tables, code, or pictures.
WIDE = ("", "reference/benchmarks/", "reference/settings/", "reference/protocol/", "how-to/migration/")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


class Document(HTMLParser):
    """A page of the site: its elements by name, the addresses that it fetches, its links, and its ids."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            if (tag, name) in FETCHED and value:
                self.fetched.append(value)
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.add(value)


def made(*command: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site as a user does, and fail on a warning.

    mkdocs ends with 1 if it has a warning.
    """
    # Install first, so that pip's messages about its indexes are not taken for mkdocs'.
    made("make", ".venv-docs/installed", f"PYTHON={sys.executable}")
    done = made("make", "docs")
    assert not [line for line in done.stderr.splitlines() if not line.startswith("INFO ")], done.stderr
    return ROOT / "build" / "site"


def pages_of(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("index.html"))


def test_every_page_is_there_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        relative = path.relative_to(ROOT / "docs").with_suffix("")
        folder = relative.parent if relative.name == "README" else relative
        assert (site / folder / "index.html").exists(), path
    for page in pages_of(site):
        assert not [link for link in Document(page).fetched if urlsplit(link).netloc], page


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    documents = {page: Document(page) for page in pages_of(site)}
    missing = []
    for page, document in documents.items():
        for link in document.links:
            if urlsplit(link).scheme or urlsplit(link).netloc:
                continue
            path, anchor = urldefrag(link)
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            target_document = documents.get(target)
            if not target.exists() or (
                anchor and target_document is not None and unquote(anchor) not in target_document.ids
            ):
                missing.append(f"{page.relative_to(site)}: {link}")
    assert not missing


def test_links_to_pages_have_their_titles(site: Path) -> None:
    link = re.compile(r'<a href="([^"]*)">([\w/-]+\.md)</a>')
    named = {
        (page.parent.name, text)
        for page in pages_of(site)
        for target, text in link.findall(page.read_text())
        if "/source/" not in f"/{target}"
    }
    assert not named
    assert ">Harden an installation</a>" in (site / "how-to/proxy/index.html").read_text()


def test_lists_and_tables_are_what_they_are_on_github(site: Path) -> None:
    """Compare the site with GitHub's reading of the pages.

    The Markdown of mkdocs is not that of GitHub: a list for one may be a paragraph for the other.
    """
    from markdown_it import MarkdownIt

    for path in (ROOT / "docs").rglob("*.md"):
        relative = path.relative_to(ROOT / "docs").with_suffix("")
        folder = relative.parent if relative.name == "README" else relative
        html = (site / folder / "index.html").read_text()
        article = html[html.index("<article") : html.index("</article>")]
        wanted = MarkdownIt("commonmark").enable("table").render(path.read_text())
        for tag in ("<li", "<table", "<tr", "<h2", "<h3", "<pre", "<img"):
            counted = len(re.findall(rf"{tag}\b", article)), len(re.findall(rf"{tag}\b", wanted))
            assert counted[0] == counted[1], (path.name, tag, counted)


def test_llms_txt_names_every_page_of_the_nav_and_its_links_exist(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    linked = LINK.findall(text)
    assert text.startswith("# hybrid-kv-router\n\n> ")
    assert not [link for link in linked if not (site / link).is_file()]
    nav = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(nav) > 40 and linked == nav
    assert text.count("): ") > 30


@pytest.fixture(scope="module")
def port(site: Path) -> Iterator[int]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_pages_fit_their_window(chromium: Browser, site: Path, port: int, width: int, scheme: str) -> None:
    with closing(BrowserPage(chromium, port, viewport={"width": width, "height": 900}, color_scheme=scheme)) as tab:
        # Look at every page but the decision records on the phone, where space is tight.
        paths = [f"{page.parent.relative_to(site).as_posix()}/".removeprefix("./") for page in pages_of(site)]
        paths = [path for path in paths if not re.match(r"adr/\d", path)]
        for path in paths if (width, scheme) == (PHONE, "light") else WIDE:
            tab.page.goto(f"{tab.address}{path}")
            tab.page.wait_for_selector("article h1")
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path
        shown = tab.page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert shown == {"light": "default", "dark": "slate"}[scheme]


def test_a_page_is_found_by_its_words_and_its_pictures_are_shown(chromium: Browser, port: int) -> None:
    with closing(BrowserPage(chromium, port, viewport={"width": DESK, "height": 900})) as tab:
        page = tab.page
        page.goto(tab.address)
        # Type key by key, because the search reads the field when a key is released.
        page.locator(".md-search__input").press_sequentially("sliding window")
        expect(page.locator(".md-search-result__item").first).to_be_visible(timeout=30_000)
        links = page.locator(".md-search-result__link").all()
        assert any("hit-rule" in (link.get_attribute("href") or "") for link in links)
        page.goto(f"{tab.address}explanation/hit-rule/")
        page.wait_for_selector("article img")
        widths = page.evaluate("[...document.querySelectorAll('article img')].map(image => image.naturalWidth)")
        assert len(widths) == 5 and all(widths)
